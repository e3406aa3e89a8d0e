"""Language models as judges, behind any server that speaks OpenAI's chat-completions protocol.

``prompt`` what is asked, ``parse`` how an answer is read, ``address`` where the server is,
``server`` one request with its retries, ``budget`` what it costs, ``session`` many requests at
once, ``judge`` the judge itself.
"""

from ia_mech.judge.llm.judge import LlmJudge

__all__ = ["LlmJudge"]
