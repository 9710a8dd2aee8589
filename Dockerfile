# NVIDIA GPUs: PyTorch's wheels bring CUDA, the host brings the driver (580 or newer) and NVIDIA's container toolkit.
#
#   docker build -t train-gpt2 .
#   docker run --gpus all --ipc=host -v "$PWD/edu_fineweb10B:/train-gpt2/edu_fineweb10B" -v "$PWD/log:/train-gpt2/log" \
#       -v train-gpt2-cache:/cache train-gpt2 torchrun --standalone --nproc_per_node=8 train_gpt2.py
#
# The volumes hold shards, runs and compiled kernels; --ipc=host is for NCCL's shared memory. On aarch64 (GH200) untested.
FROM debian:13.8-slim

# torch.compile and Triton compile with gcc, g++ and Python's headers
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ gcc python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /train-gpt2
ENV UV_PROJECT_ENVIRONMENT=/opt/venv
# uv compares each file with its hash in uv.lock
COPY pyproject.toml uv.lock ./
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9 \
    && /opt/uv/bin/uv sync --frozen --extra gpu --no-install-project --no-cache --compile-bytecode

ENV PATH=/opt/venv/bin:$PATH TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor TRITON_CACHE_DIR=/cache/triton \
    FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/cache/flash_attention
COPY . .
CMD ["python", "train_gpt2.py"]
