"""The run's page on wandb. wandb never asks a question, and an error of wandb never stops training."""

import contextlib
import dataclasses
import os

from common.cli import python_command
from common.errors import UserError, first_line


class WandbPage:
    """One run on wandb. After an error, which is printed once, all methods do nothing."""

    def __init__(self, config):
        """Decide where the page is: --wandb auto means online if wandb is logged in and offline otherwise, or
        WANDB_MODE if that is set. Raises UserError if it must be online and there is no login."""
        self.config = config
        self.run = None  # wandb's own run object, or None without a page
        self.folder = None  # of wandb's local files
        self._mode = config.wandb
        if self._mode == "auto":
            self._mode = os.environ.get("WANDB_MODE") or "auto"
        if self._mode in ("auto", "online"):
            self._mode = self._online_or_offline()

    def _online_or_offline(self):
        try:
            import wandb  # takes a second; not needed with --wandb disabled

            try:
                if wandb.login(prompt=False):
                    return "online"
                problem = "it is not logged in"
            except wandb.errors.AuthenticationError as error:
                problem = first_line(error)
        except ImportError as error:
            self.lose(error)
            return "disabled"
        except Exception as error:
            self.lose(error, "online")
            return "offline"
        if self._mode == "online":
            login = python_command("-m", "wandb", "login")
            raise UserError(f"wandb cannot be online ({problem}): run `{login}` or use --wandb offline")
        return "offline"

    def start(self, folder, facts):
        """Open the page; returns its id, or None without a page.

        folder: the run's, which takes wandb's local files. facts is shown as the run's configuration;
        facts["wandb_id"] names a page to continue, or is None.
        """
        self.folder = folder / "wandb"
        if self._mode == "disabled":
            return None
        for mode in ("online", "offline") if self._mode == "online" else (self._mode,):
            try:
                import wandb

                self._samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
                self.run = wandb.init(
                    project=self.config.wandb_project,
                    name=folder.name,
                    group=self.config.wandb_group,
                    id=facts["wandb_id"],
                    resume="allow",  # an upload adds to the page of this id
                    mode=mode,
                    dir=folder,
                    config=facts,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
                # A metric of our own as the x axis: wandb's step cannot decrease, as on a resume
                self.run.define_metric("step", hidden=True)
                self.run.define_metric("tokens", hidden=True)
                self.run.define_metric("*", step_metric="step")
                self.run.define_metric("loss/*", step_metric="tokens")
                return self.run.id
            except Exception as error:
                self.lose(error, mode)
        return None

    def log(self, step, values):
        """Send {name: value} for this step."""
        with self._no_error():
            if self.run is not None:
                self.run.log(values | dict(step=step))

    def samples(self, step, texts):
        """Add sampled texts to the page's table."""
        with self._no_error():
            if self.run is not None:
                for text in texts:
                    self._samples.add_data(step, text)
                self.run.log({"val/samples": self._samples, "step": step})

    def measurements(self, kind, results, figure):
        """Add a table of the numbers and texts of results, a list of dictionaries, and the figure if it exists."""
        with self._no_error():
            if self.run is not None:
                import wandb

                flat = [{k: x for k, x in result.items() if isinstance(x, str | int | float)} for result in results]
                columns = list(dict.fromkeys(name for row in flat for name in row))
                table = wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in flat])
                values = {f"{kind}/table": table}
                if figure.exists():
                    values[f"{kind}/figure"] = wandb.Image(str(figure))
                self.run.log(values)

    def finish(self):
        with self._no_error():
            if self.run is not None:
                self.run.finish()

    def lose(self, error, mode="run"):
        """Go on without the page after an error."""
        self.run = None
        dead_process = (ConnectionResetError, BrokenPipeError)
        if isinstance(error, dead_process):
            import wandb

            # wandb's service process is gone. Without teardown wandb prints the same error, in 30 lines, at exit
            with contextlib.suppress(*dead_process):
                wandb.teardown()
        reason = f"{type(error).__name__}: {first_line(error)}"
        print(f"wandb {mode} failed ({reason}); the run goes on without it, its folder has everything")

    def where_to_watch(self):
        """The page's URL, the commands that show and upload an offline run, or None without a page."""
        if self.run is None:
            return None
        if not self.run.offline:
            return self.run.url
        # each resume adds a folder with the same id, and the upload makes one page of them, in order of time
        show, upload = (python_command("-m", "wandb", verb, self.folder) for verb in ("leet", "sync"))
        return f"{show} (upload: {upload}/offline-run-*)"

    @contextlib.contextmanager
    def _no_error(self):
        try:
            yield
        except Exception as error:
            self.lose(error)


def publish(config, folder, kind, results):
    """Log a ladder's results as a table, and KIND.png in its folder, to a run of their own in the group of its runs."""
    page = WandbPage(dataclasses.replace(config, wandb_group=folder.name))
    page.start(folder, dict(wandb_id=None))
    page.measurements(kind, [result.get("cell", {}) | result for result in results], folder / f"{kind}.png")
    if where := page.where_to_watch():
        print(f"table and figure: {where}")
    page.finish()
