"""Wrong values of fields, by type, by name and by route, for a scripted engine; `test_http_scripted_guards` sends each one."""

from __future__ import annotations

from typing import Any

from tests.e2e.wrong_turns import WRONG_TURNS

V = 260  # width of the logits
LONGEST = 128  # max_model_len, so that a decision's prompt of bytes fits
CHAT = [{"role": "user", "content": "Hi"}]
WRONG_TYPES: dict[str, list[Any]] = {
    "integer": [2**63, -(2**63) - 1, 10**400, 1.5, 1.0, True, "7", [], {}, float("inf")],
    "number": ["0.5", True, [], {}, float("inf"), float("-inf")],
    "boolean": [1, 0, "true", [], 0.5],
    "string": [5, True, {}, 1.5],
    "array": ["x", 5, {"a": 1}, True],
    "object": ["x", 5, [1], True],
}
WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 16385, 10**9],
    "temperature": [-0.1, 2.1],
    "top_p": [0, -1, 1.1],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1],
    "max_tokens": [0, -1, LONGEST + 1, 2**31],
    "min_tokens": [-1, 3, 2**31],
    "stop": [["a"] * 5, [""], "", [1], {"a": 1}],
    "stop_token_ids": [[V], [-1], [2**31], ["a"], [True], [1.5]],
    "allowed_token_ids": [[], [V], [-1], [2**31], [1] * 1000],
    "logit_bias": [{str(V): 1}, {"-1": 5}, {"99999999": 5}, {"x": 1}, {"1.0": 1}, {" 1": 1}, {"1": "y"}, {"1": True}],
    "bad_words": [[""], ["w"] * 129, ["word " * 1100], [5]],
    "prompt_logprobs": [-2, 6, 2**32 + 1],
    "logprob_token_ids": [[1] * 129, [V], [-1]],
    "cache_salt": ["", "a/b", "a\\b", "a@b", "a\x00b", "x" * 129, "x" * 10_000],
    "truncate_prompt_tokens": [-2, LONGEST + 1, 2**31],
    "truncation_side": ["middle", 1],
    "stream_options": [{"include_usage": True}],
    "prompt_embeds": ["AAAA"],
    "use_beam_search": [1, "yes"],
    "length_penalty": [2, "x"],
    "best_of": [2, 10**6],
    "structured_outputs": [{"json": []}, {}, {"regex": "("}, {"grammar": "no"}, {"json": {"type": "str"}}, {"choice": []}],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "thinking_token_budget": [5],
    "repetition_detection": [{"min_count": 2}],
    "response_format": [{}, {"type": "json_schema"}, {"type": "nonsense"}, "text"],
    "model": [5],
}
ROUTE_VALUES: dict[str, dict[str, list[Any]]] = {
    "/v1/messages": WRONG_TURNS | {
        "max_tokens": [None, 0, -1, 2**63], "temperature": [-0.1, 2.1], "top_p": [0, -1, 1.1], "top_k": [-2, 2**31],
        "stop_sequences": [["a"] * 5, [""], [1], {"a": 1}], "cache_salt": ["", "a/b", "x" * 129], "service_tier": ["fast", 5],
    },
    "/v1/messages/count_tokens": WRONG_TURNS,
    "/v1/completions": {
        "prompt": [
            None, "", [], [[]], [""], ["a", ""], [V], [-1], [2**31 - 1], [10**9], [[1, 2], [3, 10**12]], [1, "a"], ["a", 1],
            [["a"]], [[1], "a"], [True], [1.5], 5, {"a": 1}, [2**63], [[1]] * 1025, ["a"] * 1025, "x" * 100_000, [1] * 10_000,
        ],
        "logprobs": [-2, 6, 2**32 + 1, True],
        "suffix": ["tail"],
    },
    "/v1/chat/completions": {
        "messages": [[], None, "hi", [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": 5}], [{"role": ""}], [5]],
        "top_logprobs": [1, 6, -2, 2**32 + 1],
        "chat_template": ["{{ messages }}"],
        "chat_template_kwargs": [{name: 1} for name in ("tokenize", "chat_template", "return_tensors", "conversation", "tools")],
        "max_completion_tokens": [0, -1, LONGEST + 1],
        "tools": [[], [{"type": "function", "function": {"name": "f"}}]],
        "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": ["extreme", 5],
        "verbosity": ["terse", 5, {}],
    },
    "/v1/chat/completions/batch": {
        "messages": [
            [], None, CHAT, [[]], [CHAT, []], [CHAT, [{"role": 5}]], [CHAT] * 1025, [[{"role": "user", "content": "x" * 200}]],
        ],
        "n": [2], "stream": [True], "tools": [[{"type": "function", "function": {"name": "f"}}]], "use_beam_search": [True],
    },
    "/v1/responses": {
        **{name: values for name, values in WRONG_VALUES.items() if name not in ("suffix", "stream_options")},
        "input": [[], "", None, "x" * 100_000, [{}], [{"role": "tool", "content": "x"}], [{"type": "image"}], [5]],
        "max_output_tokens": [0, -1, LONGEST + 1], "top_logprobs": [1, 6, -1], "include": [["x"], "x"], "background": ["yes"],
        "tools": [[{"type": "web_search"}], [{"type": "function", "name": "f"}]], "tool_choice": ["required", {"type": "mcp"}],
        "text": [{"format": {"type": "x"}}, {"format": {"type": "json_schema"}}, {"verbosity": "terse"}, {"x": 1}],
        "reasoning": [{"effort": "extreme"}, {"summary": "detailed"}, {"x": 1}], "metadata": [{"k": 1}, {"k": "v" * 513}],
        "chat_template": ["{{ messages }}"], "chat_template_kwargs": [{"chat_template": 1}, {"messages": 1}],
        "truncation": ["left"], "service_tier": ["flex"], "conversation": ["conv_1"], "prompt": [{"id": "p"}], "messages": [[]],
        "safety_identifier": ["x" * 65], "max_tool_calls": [0], "moderation": [{"model": "m"}], "previous_input_messages": [[{}]],
    },
    "/v1/systemone": {
        "state": ["x" * 100_000],
        "questions": [{}, {"": {"type": "noul"}}, {"q": {"type": "rank"}}, {str(i): {"type": "noul"} for i in range(65)}],
        "order": ["", "random"], "min_label_mass": [-0.1, 1.1], "images": [["x"]], "cache_salt": ["", "a/b", "x" * 129],
        "chat_template_kwargs": [{"messages": 1}, {"enable_thinking": True}],
    },
    "/v1/decisions": {
        "input": ["x" * 100_000, [], [{"role": "tool", "content": "x"}]],
        "questions": [[], [{}], [{"type": "predicate"}], [{"type": "predicate", "instructions": "", "name": None}]],
        "order": ["", "random"], "min_label_mass": [-0.1, 1.1], "unknown": [1, None], "safety_identifier": ["x" * 129],
    },
    "/tokenize": {"prompt": [None, "x" * 100_000], "messages": [[], "x", 5]},
    "/detokenize": {"tokens": [None, [-1], [264], [2**63], [2**64], ["a"], [1.5], [True], [1] * 70_000]},
}  # fmt: skip
