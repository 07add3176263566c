from __future__ import annotations

from minimax_tools.capture.digests import Digests, FileDigests, TensorDigest

ONE = TensorDigest(dtype="float32", shape=(2, 3), sha256="1" * 64)
OTHER = TensorDigest(dtype="int64", shape=(), sha256="2" * 64)


def test_order_does_not_hang_on_who_wrote_first() -> None:
    first, second = (FileDigests.of(file, {"b": ONE, "a": OTHER}) for file in ("layer_0.x", "layer_1.x"))
    one = Digests().with_files([second]).with_files([first]).with_text("z.json", "3").with_text("a.json", "4")
    other = Digests().with_text("a.json", "4").with_text("z.json", "3").with_files([first, second])
    assert one == other
    assert [name for name, _ in first.tensors] == ["a", "b"]


def test_a_file_written_again_is_replaced() -> None:
    before, after = (FileDigests.of("model.x", {"a": digest}) for digest in (ONE, OTHER))
    assert Digests().with_files([before]).with_files([after]).tensors == (after,)
    assert dict(Digests().with_text("a", "1").with_text("a", "2").texts) == {"a": "2"}


def test_files_of_a_layer_are_not_those_of_another() -> None:
    files = [FileDigests.of(f"{group}.fp32.safetensors", {}) for group in ("layer_1", "layer_11", "model")]
    digests = Digests().with_files(files)
    assert digests.of_group("layer_1") == (files[0],)
    assert digests.of_group("model") == (files[2],)
