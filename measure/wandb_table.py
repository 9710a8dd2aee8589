"""A table of measurements, with its figure, as a page on wandb."""

from watch.wandb_page import WandbPage


def publish(config, folder, kind, results):
    """Log results, a list of dictionaries, as a table of their numbers and texts, and KIND.png in their folder.

    config: a Config. Errors of wandb are printed; where the page is, too.
    """
    rows = [result.get("cell", {}) | result for result in results]
    rows = [{name: value for name, value in row.items() if isinstance(value, str | int | float)} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    figure = folder / f"{kind}.png"

    def add(run):
        import wandb

        values = {f"{kind}/table": wandb.Table(columns=columns, data=[[row.get(c) for c in columns] for row in rows])}
        if figure.exists():
            values[f"{kind}/figure"] = wandb.Image(str(figure))
        run.log(values)

    page = WandbPage(config)
    page.start(folder, dict(wandb_id=None), group=folder.name)
    page.attempt(add)
    if where := page.where_to_watch():
        print(f"table and figure: {where}")
    page.finish()
