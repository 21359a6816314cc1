"""Proofs for passes, optimizer steps and the runs they belong to."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine_fields.rig import MODEL, OTHER_MODEL, TOKENS, Rig, assert_rejected, datum
from tests.engine_fields.table import proves
from tests.unit.engine.api.asgi import PROTO
from tests.unit.engine.api.test_custom_losses import NODES, custom_pass, definition
from tinkex._wire import proto
from tinkex.types import Datum, ModelInput


def create(rig: Rig, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": rig.ada.session(),
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 2, "seed": 1},
        **changes,
    }


@proves("CreateModelRequest.session_id", "CreateModelRequest.model_seq_id")
def create_number(rig: Rig) -> None:
    assert_rejected(rig.ada.post("create_model", create(rig, session_id="nowhere")), "nowhere", 404)
    session = rig.ada.session()
    assert [rig.ada.create(session, number) for number in (0, 7)] == [
        f"{session}:train:0",
        f"{session}:train:7",
    ]


@proves("CreateModelRequest.base_model")
def create_base_model(rig: Rig) -> None:
    assert_rejected(rig.ada.post("create_model", create(rig, base_model="unheard-of")), "unheard-of", 404)
    other = rig.ada.result(rig.ada.post("create_model", create(rig, base_model=OTHER_MODEL))).json["model_id"]
    assert rig.ada.post("get_info", {"model_id": other}).json["model_name"] == OTHER_MODEL


@proves("CreateModelRequest.user_metadata")
def create_user_metadata(rig: Rig) -> None:
    made = rig.ada.result(rig.ada.post("create_model", create(rig, user_metadata={"a": "b"}))).json[
        "model_id"
    ]
    assert rig.ada.get(f"training_runs/{made}").json["user_metadata"] == {"a": "b"}


@proves("CreateModelRequest.lora_config")
def create_lora_config(rig: Rig) -> None:
    assert_rejected(rig.ada.post("create_model", create(rig, lora_config={"rank": 2, "alpha": 64})), "alpha")


@proves("CreateModelRequest.optimizer_config")
def create_optimizer_config(rig: Rig) -> None:
    dimuon = {"type": "dimuon", "version": 1}
    assert_rejected(rig.ada.post("create_model", create(rig, optimizer_config=dimuon)), "dimuon", 400, 501)
    amsgrad = {"type": "adamw", "amsgrad": True}
    assert_rejected(rig.ada.post("create_model", create(rig, optimizer_config=amsgrad)), "amsgrad")


@proves("LoraConfig.rank")
def lora_rank(rig: Rig) -> None:
    assert [rig.run(rank=rank).info()["lora_rank"] for rank in (2, 5)] == [2, 5]
    assert rig.run(rank=1).train() != rig.run(rank=8).train()


@proves("LoraConfig.seed")
def lora_seed(rig: Rig) -> None:
    first, again, other = (rig.run(seed=seed).train() for seed in (1, 1, 2))
    assert first == again != other


@proves("LoraConfig.train_unembed", "LoraConfig.train_mlp", "LoraConfig.train_attn")
def lora_parts(rig: Rig) -> None:
    whole = rig.run().train()
    for part in ("train_unembed", "train_mlp", "train_attn"):
        run = rig.run(**{part: False})
        assert run.train() != whole
        info = rig.ada.post("weights_info", {"tinker_path": run.save()}).json
        assert info[part] is False
        assert sum(info[name] for name in ("train_unembed", "train_mlp", "train_attn")) == 2


@proves("ForwardBackwardRequest.model_id")
def pass_model_id(rig: Rig) -> None:
    assert_rejected(rig.run().submit_pass(model_id="nobody"), "nobody", 404)


@proves("ForwardBackwardRequest.seq_id")
def pass_seq_id(rig: Rig) -> None:
    run = rig.run()
    first, again = (run.submit_pass(seq_id=1).json["request_id"] for _ in range(2))
    assert first == again != run.submit_pass(seq_id=2).json["request_id"]
    assert_rejected(run.submit_pass([datum([5, 6, 7])], seq_id=1), "1")


@proves("ForwardBackwardRequest.data", "Datum.model_input")
def pass_data(rig: Rig) -> None:
    run = rig.run()
    assert run.loss([datum(), datum()]) > 1.9 * run.loss() > 0
    other = Datum(ModelInput.from_ints([400, *TOKENS[1:-1]]), {"target_tokens": TOKENS[1:]})
    assert run.loss([other]) != run.loss()


@proves("Datum.loss_fn_inputs")
def pass_inputs(rig: Rig) -> None:
    run = rig.run()
    half = [datum(weights=[0.5] * (len(TOKENS) - 1))]
    assert np.isclose(run.loss(half), 0.5 * run.loss())
    assert_rejected(
        run.submit_pass([datum(loss_weights=np.ones(len(TOKENS) - 1, np.float32))]), "loss_weights"
    )


@proves("ForwardBackwardRequest.loss_fn")
def pass_loss_fn(rig: Rig) -> None:
    run = rig.run()
    ratio = [datum(logprobs=[-9.0] * (len(TOKENS) - 1), advantages=[1.0] * (len(TOKENS) - 1))]
    assert run.loss(ratio, "importance_sampling") != run.loss(ratio, "ppo")
    assert_rejected(run.submit_pass(loss_fn="stable_reinforce"), "stable_reinforce", 400, 501)
    assert_rejected(run.submit_pass(loss_fn="hinge"), "hinge", 400, 501)


@proves("ForwardBackwardRequest.loss_fn_config")
def pass_loss_fn_config(rig: Rig) -> None:
    run = rig.run()
    ratio = [datum(logprobs=[-9.0] * (len(TOKENS) - 1), advantages=[1.0] * (len(TOKENS) - 1))]
    wide, narrow = (run.loss(ratio, "ppo", {"clip_high_threshold": high}) for high in (5.0, 1.2))
    assert wide != narrow
    assert_rejected(run.submit_pass(ratio, "ppo", {"clip_middle": 1.0}), "clip_middle")


@proves("ForwardBackwardRequest.forward_only")
def pass_forward_only(rig: Rig) -> None:
    looked, trained = rig.run(), rig.run()
    before = looked.loss()
    looked.step()
    trained.output()
    trained.step()
    assert looked.loss() == before > trained.loss()


@proves("OptimStepRequest.model_id")
def step_model_id(rig: Rig) -> None:
    assert_rejected(rig.run().submit("optim_step", model_id="nobody", adam_params={}), "nobody", 404)


@proves("OptimStepRequest.seq_id")
def step_seq_id(rig: Rig) -> None:
    once, twice = rig.run(), rig.run()
    for run, times in ((once, 1), (twice, 2)):
        run.output()
        ids = {run.submit("optim_step", seq_id=2, adam_params={}).json["request_id"] for _ in range(times)}
        assert len(ids) == 1
    assert once.loss(seq_id=3) == twice.loss(seq_id=3)


@proves("OptimStepRequest.adam_params")
def step_adam_params(rig: Rig) -> None:
    assert_rejected(rig.run().submit("optim_step"), "adam_params")
    assert_rejected(rig.run().submit("optim_step", adam_params={"momentum": 0.9}), "momentum")


@proves("OptimStepRequest.optimizer_params")
def step_optimizer_params(rig: Rig) -> None:
    params = {"type": "dimuon", "learning_rate": 0.1}
    assert_rejected(rig.run().submit("optim_step", optimizer_params=params), "dimuon", 400, 501)


@proves(
    "AdamParams.learning_rate",
    "AdamParams.beta1",
    "AdamParams.beta2",
    "AdamParams.eps",
    "AdamParams.weight_decay",
    "AdamParams.grad_clip_norm",
)
def step_adam_fields(rig: Rig) -> None:
    usual = rig.run().train()
    changed = {
        "learning_rate": 0.02,
        "beta1": 0.5,
        "beta2": 0.5,
        "eps": 0.1,
        "weight_decay": 0.5,
        "grad_clip_norm": 0.01,
    }
    assert rig.run().train() == usual
    assert len({rig.run().train(**{name: value}) for name, value in changed.items()} | {usual}) == 7


@proves("UnloadModelRequest.model_id")
def unload_model(rig: Rig) -> None:
    assert_rejected(rig.ada.post("unload_model", {"model_id": "nobody"}), "nobody", 404)
    gone, kept = rig.run(), rig.run()
    rig.ada.result(rig.ada.post("unload_model", {"model_id": gone.run_id}))
    assert_rejected(gone.submit_pass(), "unloaded", 410)
    assert kept.loss() > 0


@proves("GetInfoRequest.model_id")
def get_info(rig: Rig) -> None:
    assert_rejected(rig.ada.post("get_info", {"model_id": "nobody"}), "nobody", 404)
    assert rig.ada.post("get_info", {"model_id": rig.run(rank=3).run_id}).json["lora_rank"] == 3


def loss_of(rig: Rig, **changes: Any) -> float:
    """The loss of a pass under an uploaded loss."""
    session = rig.ada.session()
    loss_id = rig.ada.result(rig.ada.post("create_custom_loss", definition(session, **changes))).json[
        "loss_id"
    ]
    run = rig.ada.create(session)
    sent = rig.ada.post("forward_backward", custom_pass(run, 1, loss_id), content_type=PROTO)
    answer = rig.ada.result(sent, accept=PROTO)
    assert answer.headers["content-type"] == PROTO, answer.body
    return proto.decode_forward_backward_output(answer.body).metrics["loss:sum"]


@proves("CreateCustomLossRequest.session_id")
def custom_loss_session(rig: Rig) -> None:
    assert_rejected(rig.ada.post("create_custom_loss", definition("nowhere")), "nowhere", 404)


@proves("CreateCustomLossRequest.custom_loss_seq_id")
def custom_loss_number(rig: Rig) -> None:
    session = rig.ada.session()
    ids = [
        rig.ada.result(rig.ada.post("create_custom_loss", definition(session, n))).json["loss_id"]
        for n in (0, 1)
    ]
    assert ids[0] != ids[1]


@proves("CreateCustomLossRequest.name")
def custom_loss_name(rig: Rig) -> None:
    session = rig.ada.session()
    assert rig.ada.post("create_custom_loss", definition(session)).status == 200
    assert_rejected(rig.ada.post("create_custom_loss", definition(session, name="another")), "0")


@proves("CreateCustomLossRequest.inputs", "CustomLossInput.name", "CustomLossInput.rank")
def custom_loss_inputs(rig: Rig) -> None:
    for inputs in (
        [{"name": "logprobs", "rank": 1}],
        [{"name": "logprobs", "rank": 1}, {"name": "others", "rank": 1}],
    ):
        answer = rig.ada.post("create_custom_loss", definition(rig.ada.session(), inputs=inputs))
        assert_rejected(answer, "weights")
    session = rig.ada.session()
    ranks = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 2}]
    loss_id = rig.ada.result(rig.ada.post("create_custom_loss", definition(session, inputs=ranks))).json[
        "loss_id"
    ]
    sent = rig.ada.post(
        "forward_backward", custom_pass(rig.ada.create(session), 1, loss_id), content_type=PROTO
    )
    assert_rejected(sent, "weights")


@proves("CreateCustomLossRequest.graph", "CustomLossGraph.nodes")
def custom_loss_graph(rig: Rig) -> None:
    twice = {**NODES[4], "target": "operator.mul", "args": [{"ref": "total"}, -2.0]}
    assert np.isclose(
        loss_of(rig, graph={"format": 1, "nodes": [*NODES[:4], twice, NODES[5]]}), 2 * loss_of(rig), rtol=1e-5
    )


@proves("CustomLossGraph.format")
def custom_loss_format(rig: Rig) -> None:
    graph = {"format": 2, "nodes": NODES}
    assert_rejected(rig.ada.post("create_custom_loss", definition(rig.ada.session(), graph=graph)), "format")


@proves(
    "CustomLossNode.op",
    "CustomLossNode.name",
    "CustomLossNode.target",
    "CustomLossNode.args",
    "CustomLossNode.kwargs",
)
def custom_loss_nodes(rig: Rig) -> None:
    wrong = {
        "op": ("call_module", "call_module"),
        "name": ("mul", "mul"),
        "target": ("os.system", "os.system"),
        "args": ([{"ref": "nobody"}], "nobody"),
        "kwargs": ({"dim": {"ref": "nobody"}}, "nobody"),
    }
    for field, (value, words) in wrong.items():
        nodes = [*NODES[:4], {**NODES[4], field: value}, NODES[5]]
        answer = rig.ada.post(
            "create_custom_loss", definition(rig.ada.session(), graph={"format": 1, "nodes": nodes})
        )
        assert_rejected(answer, words)
