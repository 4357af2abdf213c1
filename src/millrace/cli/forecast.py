"""``millrace forecast``: writes forecasts of the rows to come as a table, or draws earlier ones as a picture."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from millrace.cli import options
from millrace.cli.printing import print_json, print_line

EXAMPLE = "millrace forecast runs/lstm --out forecast.csv"


def run(
    path: options.RunFolder,
    entity: Annotated[str | None, Option(help="Only this entity, by name or number.")] = None,
    target: Annotated[list[str] | None, Option(help="Only this target; repeatable.")] = None,
    windows: Annotated[int, Option(min=1, help="Picture: how many of the last horizons to draw.")] = 4,
    out: Annotated[
        str | None, Option(help="A table (.csv, .parquet) or a picture (.png).", show_default="RUN/forecast.png")
    ] = None,
    checkpoint: options.Checkpoint = "latest",
    store: options.MovedStore = None,
    model: options.OwnModel = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text; no picture is drawn.")] = False,
) -> None:
    """Forecast the rows to come, or draw past forecasts.

    With --out FILE.csv or FILE.parquet: the rows after the last row of every entity, in the units of the source. The table
    has the columns entity, time, and one per target. Otherwise: a picture of the last horizons of one --entity.
    """
    from pathlib import Path

    from millrace.errors import ConfigError

    is_table = out is not None and Path(out).suffix in (".csv", ".parquet")
    if out is not None and not is_table and Path(out).suffix not in (".png", ".svg", ".pdf", ".jpg"):
        raise ConfigError(f"--out {out}: expected a name that ends in .csv or .parquet (a table) or .png (a picture)")
    if entity is None and not is_table:
        with options.training_extras():
            from millrace.train.run_folder import existing_run
        existing_run(Path(path))
        raise ConfigError(
            "what to forecast? --out forecast.csv (or .parquet) for the rows to come of every entity; --entity NAME for a "
            "picture of one"
        )
    trained = options.load_trained(path, checkpoint, model, store)
    if out is not None and is_table:
        write_table(trained, Path(out), entity, target or [], as_json)
    else:
        draw(trained, Path(out or Path(path) / "forecast.png"), str(entity), windows, target or [], as_json)


def write_table(trained: Any, out: Any, entity: str | None, target: list[str], as_json: bool) -> None:
    """Forecasts after the last rows of the store as it is now; it may have grown since the run began."""
    import sys

    import numpy as np

    from millrace.errors import ConfigError
    from millrace.store import platform
    from millrace.store.open import open_store
    from millrace.train.console import StreamConsole
    from millrace.train.prediction import Predictor, chosen_targets, predictions, record_of
    from millrace.train.prediction_table import PredictionTable

    predictor = Predictor(trained, open_store(trained.store.path))
    is_long = predictor.is_long_enough()
    asked = np.arange(len(is_long)) if entity is None else np.array([record_of(predictor.store, entity)])
    records, short = asked[is_long[asked]], asked[~is_long[asked]]
    if not len(records):
        raise ConfigError(f"no forecast: it needs {predictor.min_rows:,} rows of an entity, and none has as many")
    chosen = chosen_targets(target, predictor.targets)
    zone = (predictor.store.meta.get("time") or {}).get("zone")
    console = StreamConsole(sys.stderr)
    table = PredictionTable(out, [predictor.targets[k] for k in chosen], zone)

    def note(done: int, of: int) -> None:
        console.note(f"forecast: {done:,} of {of:,} entities")

    with platform.writing(out):
        try:
            for batch in predictions(predictor, records, note):
                table.write(batch, chosen)
            table.finish()
        except BaseException:
            table.discard()
            raise
    if as_json:
        facts = {"out": str(out), "step": trained.step, "entities": len(records), "rows": table.rows}
        print_json({**facts, "too_short": predictor.names(short)})
        return
    print_line(f"wrote {out}: {predictor.horizon:,} rows for each of {len(records):,} entities, after their last rows")
    if len(short):
        names = ", ".join(predictor.names(short[:5])) + (", ..." if len(short) > 5 else "")
        print_line(f"left out {len(short):,} entities with fewer than {predictor.min_rows:,} rows: {names}")


def draw(trained: Any, picture: Any, entity: str, windows: int, target: list[str], as_json: bool) -> None:
    """Draws the last horizons of an entity against what happened."""
    from millrace.train.backtest import backtest, plot_backtest

    test = backtest(trained, entity, windows=windows, target=target)
    if as_json:
        values = {name: _with_nulls(getattr(test, name)) for name in ("rows", "truth", "forecast")}
        times = test.times[test.places]
        values["times"] = (times.astype(str) if times.dtype.kind == "M" else times).tolist()
        print_json({"step": trained.step, "entity": entity, "targets": test.targets, "mse": test.mse, **values})
        return
    plot_backtest(test, picture)
    errors = ", ".join(f"{'unknown' if mse is None else f'{mse:.4g}'} ({name})" for name, mse in test.mse.items())
    print_line(f"{entity}: {len(test.rows)} forecasts of {test.rows.shape[1]} rows, mean squared error {errors}")
    print_line(f"drew {picture}")


def _with_nulls(values: Any) -> Any:
    """The values as lists, with null for NaN."""
    cells = values.astype(object)
    cells[values != values] = None  # only NaN differs from itself
    return cells.tolist()
