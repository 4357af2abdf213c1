"""``millrace forecast``: what a trained model says of the rows to come, as a table; or of the last ones, as a picture."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace forecast runs/lstm --out forecast.csv"


def run(
    path: Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run.")],
    entity: Annotated[str | None, typer.Option(help="Only this entity, by its name or number.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target; may be repeated.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Picture: how many horizons, the last of the entity.")] = 4,
    out: Annotated[
        str | None,
        typer.Option(help="A table (.csv, .parquet) or a picture (.png).", show_default="RUN/forecast.png"),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="latest or best.")] = "latest",
    store: Annotated[str | None, typer.Option(help="The run's store, if it was moved.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="The run's own model, if you trust it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines; draws nothing.")] = False,
) -> None:
    """Forecast the rows to come, or draw past forecasts.

    With --out FILE.csv or FILE.parquet: forecasts behind the last row of every entity, in the units of the source, with the
    columns entity, time and one per target. Else: a picture of the last horizons of one --entity.
    """
    from pathlib import Path

    from millrace.cli.train_console import training_extras
    from millrace.errors import ConfigError

    with training_extras():
        from millrace.train.load import load_model

    is_table = out is not None and Path(out).suffix in (".csv", ".parquet")
    if out is not None and not is_table and Path(out).suffix not in (".png", ".svg", ".pdf", ".jpg"):
        raise ConfigError(f"--out {out}: expected a name that ends in .csv or .parquet (a table) or .png (a picture)")
    if entity is None and not is_table:
        raise ConfigError(
            "what to forecast? --out forecast.csv (or .parquet) for the rows to come of every entity; --entity NAME for a "
            "picture of one"
        )
    trained = load_model(Path(path), checkpoint, own=model, store=store)
    if out is not None and is_table:
        write_table(trained, Path(out), entity, target or [], as_json)
    else:
        assert entity is not None
        draw(
            trained,
            Path(out) if out is not None else Path(path) / "forecast.png",
            entity,
            windows,
            target or [],
            as_json,
        )


def write_table(trained: Any, out: Any, entity: str | None, target: list[str], as_json: bool) -> None:
    """Forecasts behind the last rows of the store as it is now, which may have grown since the run began."""
    import sys

    import numpy as np

    from millrace.cli.console import print_json, print_line
    from millrace.errors import ConfigError
    from millrace.store import platform
    from millrace.store.open import open_store
    from millrace.train.console import StreamConsole
    from millrace.train.forecast import chosen_targets, record_of
    from millrace.train.forecast_table import ForecastTable
    from millrace.train.predict import Predictor, predictions

    predictor = Predictor(trained, open_store(trained.store.path))
    is_long = predictor.is_long_enough()
    asked = np.arange(len(is_long)) if entity is None else np.array([record_of(predictor.store, entity)])
    records, short = asked[is_long[asked]], asked[~is_long[asked]]
    if not len(records):
        raise ConfigError(f"no forecast: a forecast needs {predictor.needs:,} rows of an entity, and none has as many")
    chosen = chosen_targets(target, predictor.targets)
    zone = (predictor.store.meta.get("time") or {}).get("zone")
    console = StreamConsole(sys.stderr)
    table = ForecastTable(out, [predictor.targets[k] for k in chosen], zone)
    with platform.writing(out):
        try:
            for batch in predictions(
                predictor, records, lambda done, of: console.note(f"forecast: {done:,} of {of:,} entities")
            ):
                table.write(batch, chosen)
            table.finish()
        except BaseException:
            table.discard()
            raise
    if as_json:
        facts = {"out": str(out), "step": trained.step, "entities": len(records), "rows": table.rows}
        print_json({**facts, "too_short": predictor.names(short)})
        return
    print_line(f"wrote {out}: {predictor.horizon:,} rows for each of {len(records):,} entities, behind their last rows")
    if len(short):
        names = ", ".join(predictor.names(short[:5])) + (", ..." if len(short) > 5 else "")
        print_line(f"left out {len(short):,} entities with fewer than {predictor.needs:,} rows: {names}")


def draw(trained: Any, picture: Any, entity: str, windows: int, target: list[str], as_json: bool) -> None:
    """The last horizons of an entity against what happened."""
    from millrace.cli.console import print_json, print_line
    from millrace.train.forecast import forecast, plot_forecast

    found = forecast(trained, entity, windows=windows, target=target)
    if as_json:
        values = {name: _with_nulls(getattr(found, name)) for name in ("rows", "truth", "forecast")}
        values["times"] = found.times.astype(str if found.times.dtype.kind == "M" else found.times.dtype)[
            found.places
        ].tolist()
        print_json({"step": trained.step, "entity": entity, "targets": found.targets, "mse": found.mse, **values})
        return
    plot_forecast(found, picture)
    errors = ", ".join(f"{'unknown' if mse is None else f'{mse:.4g}'} ({name})" for name, mse in found.mse.items())
    print_line(f"{entity}: {len(found.rows)} forecasts of {found.rows.shape[1]} rows, mean squared error {errors}")
    print_line(f"drew {picture}")


def _with_nulls(values: Any) -> Any:
    """As lists, null where a value is missing."""
    whole = values.astype(object)
    whole[values != values] = None  # only NaN is not itself
    return whole.tolist()
