import itertools
import threading

import pytest

from common.errors import UserError
from data import demo
from data.shards import open_shards


def test_the_corpus_is_deterministic(tmp_path, capsys, monkeypatch):
    """Also if two processes make it at once. Threads stand for them: each opens the lock's file itself."""
    documents = demo.read_documents
    monkeypatch.setattr(demo, "read_documents", lambda: itertools.islice(documents(), 120))
    demo.make_data(tmp_path / "one")
    assert "train_000001.npy" in capsys.readouterr().out
    threads = [threading.Thread(target=demo.make_data, args=(tmp_path / "two",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().out.count("demo corpus") == 2  # one train, one val
    for split, at_least in (("val", 2_000), ("train", 20_000)):
        one, two = (open_shards(tmp_path / name, split)[0][:] for name in ("one", "two"))
        assert len(one) > at_least and (one == two).all()
    demo.make_data(tmp_path / "one")
    assert capsys.readouterr().out == ""  # both shards exist


def test_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "read_documents", lambda: iter([]))
    with pytest.raises(UserError, match="has no docstrings"):
        demo.make_data(tmp_path)
    (tmp_path / "x_train_000001.npy").write_bytes(b"")
    with pytest.raises(UserError, match="holds 1 other shards"):
        demo.make_data(tmp_path)
