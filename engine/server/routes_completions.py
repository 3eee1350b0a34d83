"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.server.answering import Answer
from engine.server.asking import id_header, make_ask
from engine.server.described import ANSWERS, STREAMED
from engine.server.errors import ApiError
from engine.server.house import House
from engine.server.protocol import ChatRequest, CompletionRequest
from engine.server.sending import Json


def completion_routes(house: House) -> APIRouter:
    """What clients of the OpenAI API use."""
    router = APIRouter(prefix="/v1")

    def answer(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        return Answer(house, make_ask(body, id_header(request.headers), house.served_model))

    @router.post("/completions", response_class=Response, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, several texts, or lists of token ids."""
        return answer(body, request)

    @router.post("/chat/completions", response_class=Response, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, by the model's chat template."""
        return answer(body, request)

    @router.get("/models", response_class=Response, responses=ANSWERS)
    async def models() -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [_model(house)]})

    @router.get("/models/{model:path}", response_class=Response, responses=ANSWERS)
    async def model(model: str) -> Response:
        """One model."""
        if model != house.served_model:
            message = f"model {model!r} is not served here (there is: {house.served_model!r})"
            raise ApiError(404, message, param="model", code="model_not_found")
        return Json(_model(house))

    return router


def _model(house: House) -> dict[str, Any]:
    return {
        "id": house.served_model,
        "object": "model",
        "created": int(house.started_unix_s),
        "owned_by": "zipage-lab",
        "max_model_len": house.max_model_len,
    }
