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
        self.run = None  # wandb's own run object, or None without a page
        mode = os.environ.get("WANDB_MODE") or "auto" if config.wandb == "auto" else config.wandb
        self._modes = [] if mode == "disabled" else ["offline"]  # of the page; after an error, the next
        self._why_offline = None
        if mode in ("auto", "online"):
            self._why_offline = self._login_problem()
            if not self._why_offline:
                self._modes.insert(0, "online")
            elif mode == "online":
                login = python_command("-m", "wandb", "login")
                raise UserError(f"wandb cannot be online ({self._why_offline}): run `{login}` or use --wandb offline")

    def _login_problem(self):
        """Why wandb cannot be online, or None. It does not ask wandb's server."""
        try:
            import wandb  # takes a second

            wandb.setup(wandb.Settings(silent=True))
            return None if wandb.login(prompt=False, verify=False) else "it is not logged in"
        except Exception as error:  # a malformed key
            return first_line(error)

    def start(self, folder, facts):
        """Open the page; returns its id, or None without a page.

        folder: the run's, which takes wandb's local files. facts is shown as the run's configuration;
        facts["wandb_id"] names a page to continue, or is None. The environment variable WANDB_RUN_GROUP names a group.
        """
        self._folder = folder / "wandb"
        for mode in self._modes:
            try:
                import wandb

                timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", 30))  # seconds that the server has to answer
                self._samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
                self.run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "gpt2"),
                    name=folder.name,
                    id=facts["wandb_id"],
                    resume="allow",  # an upload adds to the page of this id
                    mode=mode,
                    dir=folder,
                    config=facts,
                    settings=wandb.Settings(silent=True, init_timeout=timeout),
                )
                return self.run.id
            except Exception as error:
                self._lose(error, mode)
        return None

    def log(self, step, values):
        """Send a row of metrics.jsonl: train_NAME and what else a step has as train/NAME, evaluations as val/NAME."""
        if self.run is None:
            return
        group, page = "train" if "train_loss" in values else "val", {}
        for name, value in values.items():
            if name == "own_ms":
                page |= {f"ranks/own_ms_{rank}": ms for rank, ms in enumerate(value)}
            elif isinstance(value, int | float):
                page[f"{group}/{name.removeprefix(f'{group}_')}"] = value
        with self._errors_end_it():
            if "samples" in values:
                for text in values["samples"]:
                    self._samples.add_data(step, text)
                page["val/samples"] = self._samples
            self.run.log(page, step=step, commit=group == "train")  # evaluations come before the training step

    def finish(self):
        if self.run is not None:
            with self._errors_end_it():
                self.run.finish()

    @contextlib.contextmanager
    def _errors_end_it(self):
        try:
            yield
        except Exception as error:
            self._lose(error)

    def _lose(self, error, mode=None):
        """Go on without the page after an error. mode: that of a page that could not be opened."""
        self.run = None
        if isinstance(error, ConnectionResetError | BrokenPipeError):  # wandb's service has died
            import wandb

            with contextlib.suppress(OSError):
                wandb.teardown()  # else wandb prints the same error, in 30 lines, at exit
        then = "it records offline" if mode == "online" else "the run goes on without it, its folder has everything"
        print(f"wandb {mode or 'run'} failed ({type(error).__name__}: {first_line(error)}); {then}")

    def where_to_watch(self):
        """{"watch": the page's URL}; the commands to watch and upload an offline run; None without a page."""
        if self.run is None:
            return None
        if not self.run.offline:
            return dict(watch=self.run.url)
        # each resume adds a folder with the same id, and the upload makes one page of them, in order of time
        show, upload = (python_command("-m", "wandb", verb, self._folder) for verb in ("leet", "sync"))
        why = f" (offline, since {self._why_offline})" if self._why_offline else ""
        return dict(watch=f"{show}{why}", upload=f"{upload}/offline-run-*")
