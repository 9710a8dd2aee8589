import pytest

from common.cli import UserError
from data import demo
from data.loader import TokenStream
from data.shards import open_shards


def test_the_corpus_is_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        demo.make_data(tmp_path / name)
    for split, least in (("val", 20_000), ("train", 200_000)):
        shards = [open_shards(tmp_path / name, split)[0] for name in ("one", "two")]
        assert TokenStream(shards[:1]).total > least
        assert (shards[0] == shards[1]).all()


def test_a_python_without_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "read_documents", lambda: iter([]))
    with pytest.raises(UserError, match="ships without its library's source"):
        demo.make_data(tmp_path)
