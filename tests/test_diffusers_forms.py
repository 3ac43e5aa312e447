"""`scaledot.diffusers.set_processor`: a processor is exchanged where it uses all projections."""

import importlib

import pytest

diffusers = pytest.importorskip("diffusers")
module = importlib.import_module("scaledot.diffusers")
kinds = importlib.import_module("diffusers.models.attention_processor")

WIDTH = 8
KEYS = {"added_kv_proj_dim": WIDTH, "norm_num_groups": 2}
FORMS = {
    "plain": {},
    "added keys": KEYS | {"added_proj_bias": True, "only_cross_attention": False},
    "joint": KEYS | {"context_pre_only": False},
}
PROCESSORS = {
    "plain": (kinds.AttnProcessor(), kinds.AttnProcessor2_0(), kinds.SlicedAttnProcessor(1)),
    "added keys": (kinds.AttnAddedKVProcessor(), kinds.AttnAddedKVProcessor2_0(),
                   kinds.SlicedAttnAddedKVProcessor(1)),
    "joint": (kinds.JointAttnProcessor2_0(),),
}  # fmt: skip


@pytest.mark.parametrize("of_module", FORMS)
@pytest.mark.parametrize("of_processor", PROCESSORS)
def test_processor_and_module_must_be_of_one_form(of_processor, of_module):
    for processor in PROCESSORS[of_processor]:
        attn = kinds.Attention(
            query_dim=WIDTH, heads=2, dim_head=4, processor=processor, **FORMS[of_module]
        )
        if of_module == of_processor or (of_processor, of_module) == ("joint", "plain"):
            module.set_processor(attn)
            assert isinstance(attn.processor, module.AttnProcessor)
            module.set_processor(attn)  # again is allowed
        else:
            with pytest.raises(ValueError, match=f"got {type(processor).__name__} at the model"):
                module.set_processor(attn)
            assert attn.processor is processor


@pytest.mark.parametrize("more", [
    {"residual_connection": True}, {"rescale_output_factor": 2.0}, {"norm_num_groups": 2},
])  # fmt: skip
def test_a_joint_processor_leaves_out_what_a_plain_module_may_have(more):
    processor = kinds.JointAttnProcessor2_0()
    attn = kinds.Attention(query_dim=WIDTH, heads=2, dim_head=4, processor=processor, **more)
    with pytest.raises(ValueError, match="got JointAttnProcessor2_0 at the model"):
        module.set_processor(attn)
    assert attn.processor is processor
