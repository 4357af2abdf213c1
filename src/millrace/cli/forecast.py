"""``millrace forecast``: forecasts of a trained model for one entity, drawn against what happened."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace forecast runs/lstm --entity sensor-007"


def run(
    path: Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run.")],
    entity: Annotated[str, typer.Option(help="Name or number of the entity.")],
    target: Annotated[list[str] | None, typer.Option(help="Only this target; may be repeated.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="How many horizons, the last of the entity.")] = 4,
    out: Annotated[str | None, typer.Option(help="The picture.", show_default="RUN/forecast.png")] = None,
    checkpoint: Annotated[str, typer.Option(help="latest or best.")] = "latest",
    store: Annotated[str | None, typer.Option(help="The run's store, if it was moved.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="The run's own model, if you trust it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines; draws nothing.")] = False,
) -> None:
    """Draw forecasts of an entity against what happened."""
    from pathlib import Path

    from millrace.cli.console import print_json, print_line
    from millrace.cli.train_console import training_extras

    with training_extras():
        from millrace.train.forecast import forecast, plot_forecast
        from millrace.train.load import load_model

    trained = load_model(Path(path), checkpoint, own=model, store=store)
    found = forecast(trained, entity, windows=windows, target=target or [])
    if as_json:
        values = {name: _with_nulls(getattr(found, name)) for name in ("rows", "truth", "forecast")}
        values["times"] = found.times.astype(str if found.times.dtype.kind == "M" else found.times.dtype)[
            found.places
        ].tolist()
        print_json({"step": trained.step, "entity": entity, "targets": found.targets, "mse": found.mse, **values})
        return
    picture = Path(out) if out is not None else Path(path) / "forecast.png"
    plot_forecast(found, picture)
    errors = ", ".join(f"{'unknown' if mse is None else f'{mse:.4g}'} ({name})" for name, mse in found.mse.items())
    print_line(f"{entity}: {len(found.rows)} forecasts of {found.rows.shape[1]} rows, mean squared error {errors}")
    print_line(f"drew {picture}")


def _with_nulls(values: Any) -> Any:
    """As lists, null where a value is missing."""
    whole = values.astype(object)
    whole[values != values] = None  # only NaN is not itself
    return whole.tolist()
