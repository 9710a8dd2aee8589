"""What the forks of the tests share: the imports, GPT-2's tokenizer, and objects that no garbage collector visits."""

import atexit
import gc
import multiprocessing.spawn  # noqa: F401  it keeps sys.executable

import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch._dynamo  # noqa: F401
import typeguard  # noqa: F401
import tyro

import train_gpt2  # noqa: F401
from config import Config
from data.tokenizer import token_bytes

token_bytes()
tyro.cli(Config, args=[])  # imports more
gc.freeze()  # process_group.stop() collects garbage: among all modules that takes half a second
atexit.register(gc.unfreeze)  # Triton's bindings count what is left at the end
