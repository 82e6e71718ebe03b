"""POST /v1/systemone: typed questions about a state, answered with probabilities."""

from __future__ import annotations

from starlette.responses import Response

from halfbyte.entrypoints.decisions.decider import Asking
from halfbyte.entrypoints.decisions.orders import check_order
from halfbyte.entrypoints.decisions.questions import read_questions
from halfbyte.entrypoints.decisions.results import as_decision
from halfbyte.entrypoints.openai.decision_protocol import SystemOneRequest
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.reads import decide
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.errors import UserError


async def create(frontend: Frontend, call: Call, request: SystemOneRequest) -> Response:
    call.use_body_label(request.request_id)
    model = frontend.served_model(request.model)
    frontend.require_serving()
    refuse_unsupported(request.model_extra)
    frontend.decider.require_some()
    for name in ("images", "audio", "videos"):
        if getattr(request, name):
            raise UserError(f"{name}: this model reads text only; leave it out", param=name)
    questions = read_questions(request.questions)
    asking = Asking(
        state=request.state,
        instructions=request.instructions or None,
        template_kwargs=request.chat_template_kwargs or {},
        order=check_order(request.order),
        min_label_mass=request.min_label_mass or 0.0,
    )
    result = await decide(frontend, call, questions, asking, model, priority=request.priority or 0, cache_salt=request.cache_salt)
    with_prompts = bool(request.return_prompt)
    return to_json(as_decision(result, id=call.public_id, created=call.created, model=model, with_prompts=with_prompts))
