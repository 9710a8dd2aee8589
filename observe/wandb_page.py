"""The run's page on wandb. wandb never asks a question, and an error of wandb never stops training."""

import contextlib
import os
from pathlib import Path


class WandbPage:
    """One run on wandb. After an error, which is printed once, all methods do nothing."""

    def __init__(self, config, folder):
        """folder: the run's folder, which takes wandb's local files."""
        self.config = config
        self.folder = folder
        self.run = None  # wandb's own run object, or None without a page

    def start(self, facts):
        """Open the page; returns its id, or None without a page.

        --wandb auto means online if wandb is logged in and offline otherwise, or WANDB_MODE if that is set. facts is
        shown as the run's configuration; facts["wandb_id"] names a page to continue, or is None.
        """
        choice = self.config.wandb
        if choice == "auto":
            choice = os.environ.get("WANDB_MODE", "auto")
        if choice == "disabled":
            return None
        for mode in ("online", "offline") if choice in ("auto", "online") else (choice,):
            try:
                import wandb  # takes a second; not needed with --wandb disabled

                if mode == "online" and not wandb.login(prompt=False):
                    if choice == "online":
                        print("wandb is not logged in: `wandb login` once; this run is recorded offline")
                    continue
                self._samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
                self.run = wandb.init(
                    project=self.config.wandb_project,
                    name=self.config.run_name,
                    group=self.config.wandb_group,
                    id=facts["wandb_id"],
                    resume="allow" if facts["wandb_id"] else None,
                    mode=mode,
                    dir=self.folder,
                    config=facts,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
                # A metric of our own as the x axis: wandb's step cannot decrease, as on a resume
                self.run.define_metric("step", hidden=True)
                self.run.define_metric("*", step_metric="step")
                self.run.define_metric("by_tokens/*", step_metric="tokens")
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
                self.run.log(dict(samples=self._samples, step=step))

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
        print(
            f"wandb {mode} failed ({type(error).__name__}: {error}); training goes on, all metrics are in {self.folder}"
        )

    def where_to_watch(self):
        """The page's URL, the command that shows an offline run in the terminal, or None without a page."""
        if self.run is None:
            return None
        return f"wandb leet {Path(self.run.dir).parent}" if self.run.offline else self.run.url

    @contextlib.contextmanager
    def _no_error(self):
        try:
            yield
        except Exception as error:
            self.lose(error)
