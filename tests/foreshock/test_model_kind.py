"""The kind of a model is read from its configuration, whatever the family calls its number of experts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from foreshock import model_kind

MIXTURES = [
    "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "jamba", "jetmoe",
    "llama4", "minimax", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
]  # fmt: skip
DENSE = ["gemma2", "gemma3", "glm4", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen2_5_vl", "qwen3"]


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "moe") for family in MIXTURES), *((family, "dense") for family in DENSE)]
)
def test_kind_of_a_family_is_recognised(family: str, kind: model_kind.ModelKind) -> None:
    assert model_kind.model_kind_of_configuration(CONFIG_MAPPING[family]().to_dict()) == kind


@pytest.mark.parametrize(
    ("configuration", "kind"),
    [
        # One family has dense and sparse members: the number of experts decides, not the architecture.
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, "dense"),
        ({"model_type": "granitemoehybrid", "num_local_experts": 64}, "moe"),
        ({"model_type": "deepseek_v3", "n_routed_experts": None}, "dense"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 1}, "dense"),
        ({"model_type": "ernie4_5_vl_moe", "moe_num_experts": [64, 64]}, "moe"),
        ({"architectures": ["LongModel"], "text_config": {"num_local_experts": 16}}, "moe"),
        ({"text_config": {"hidden_size": 64}}, "dense"),
        # A distillation of a mixture is dense: its name has DeepSeek, its configuration Qwen2.
        ({"_name_or_path": "DeepSeek-R1-Distill-Qwen-7B", "model_type": "qwen2"}, "dense"),
        ({"model_type": "llama", "num_experts": True}, "dense"),
        ({"model_type": "llama", "num_experts_per_tok": 8}, "dense"),
        ({}, None),
        ({"format": "something else"}, None),
    ],
)
def test_model_kind_follows_from_the_experts(configuration: dict[str, Any], kind: model_kind.ModelKind | None) -> None:
    assert model_kind.model_kind_of_configuration(configuration) == kind


def test_model_kind_of_a_folder_is_read_from_config_json(tmp_path: Path) -> None:
    assert model_kind.model_kind_of_folder(tmp_path) is None
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    assert model_kind.model_kind_of_folder(tmp_path) == "moe"
    for damaged in ("{", "[1]", "[" * 100_000, '"text"', json.dumps({"model_type": "x" * (1 << 20)})):
        file.write_text(damaged)
        assert model_kind.model_kind_of_folder(tmp_path) is None


def test_unknown_model_kind_is_judged_as_dense() -> None:
    assert [model_kind.judged_as(kind) for kind in (None, "dense", "moe")] == ["dense", "dense", "moe"]
    known = [model_kind.known_model_kind(value) for value in ("dense", "moe", "a new kind", None, 3)]
    assert known == ["dense", "moe", None, None, None]
