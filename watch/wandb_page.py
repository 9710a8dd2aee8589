"""The run's page on wandb. wandb never asks a question, and an error of wandb never stops training."""

import contextlib
import os

from common.cli import python_command
from common.errors import UserError, first_line


class WandbPage:
    """One run on wandb. After an error, which is printed once, all methods do nothing."""

    def __init__(self, config):
        """Decide where the page is: --wandb auto means online if wandb is logged in and offline otherwise, or
        WANDB_MODE if that is set. Raises UserError if it must be online and there is no login."""
        self.project = config.wandb_project
        self.run = None  # wandb's own run object, or None without a page
        mode = os.environ.get("WANDB_MODE") or "auto" if config.wandb == "auto" else config.wandb
        self.modes = [] if mode == "disabled" else ["offline"]  # of the page; after an error, the next
        if mode in ("auto", "online") and self._logged_in(mode):
            self.modes.insert(0, "online")

    def _logged_in(self, mode):
        try:
            import wandb  # takes a second
            from wandb.errors import AuthenticationError
        except ImportError:
            return False  # start() says it
        try:
            if wandb.login(prompt=False):
                return True
            problem = "it is not logged in"
        except AuthenticationError as error:
            problem = first_line(error)
        except Exception as error:  # no network
            return self.lose(error, "online")
        if mode == "online":
            login = python_command("-m", "wandb", "login")
            raise UserError(f"wandb cannot be online ({problem}): run `{login}` or use --wandb offline")
        return False

    def start(self, folder, facts):
        """Open the page; returns its id, or None without a page.

        folder: the run's, which takes wandb's local files. facts is shown as the run's configuration;
        facts["wandb_id"] names a page to continue, or is None. The environment variable WANDB_RUN_GROUP names a group.
        """
        self.folder = folder / "wandb"
        for mode in self.modes:
            try:
                import wandb

                self._samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
                self.run = wandb.init(
                    project=self.project,
                    name=folder.name,
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

    def log(self, step, tokens, values):
        """Send a row of metrics.jsonl: train_NAME and what else a step has as train/NAME, evaluations as val/NAME."""
        group = "train" if "train_loss" in values else "val"
        page = dict(step=step, tokens=tokens)
        for name, value in values.items():
            if name == "own_ms":
                page |= {f"ranks/own_ms_{rank}": ms for rank, ms in enumerate(value)}
            elif isinstance(value, int | float):
                page[f"{group}/{name.removeprefix(f'{group}_')}"] = value
        if f"{group}_loss" in values:
            page[f"loss/{group}"] = values[f"{group}_loss"]

        def send(run):
            if "samples" in values:
                for text in values["samples"]:
                    self._samples.add_data(step, text)
                page["val/samples"] = self._samples
            run.log(page)

        self.attempt(send)

    def finish(self):
        self.attempt(lambda run: run.finish())

    def attempt(self, send):
        """Call send(wandb's run) if there is a page; an error of it ends the page."""
        try:
            if self.run is not None:
                send(self.run)
        except Exception as error:
            self.lose(error)

    def lose(self, error, mode="run"):
        """Go on without the page after an error."""
        self.run = None
        if isinstance(error, ConnectionResetError | BrokenPipeError):  # wandb's service has died
            import wandb

            with contextlib.suppress(OSError):
                wandb.teardown()  # else wandb prints the same error, in 30 lines, at exit
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
