"""What the checks of the official clients share: the clients, and a list of checks that are all run and reported.

Every check is a function whose name is a sentence. Answers must arrive whole and streamed with the same text, errors as
the exception class that the client's users catch.
"""

import sys

import anthropic
import openai

URL, MODEL = sys.argv[1:3]
CHECKS = []

OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=30)


def check(function):
    CHECKS.append(function)
    return function


def expect(condition, found):
    if not condition:
        raise AssertionError(f"found {found!r}")


def raises(kind, call, **fields):
    """The exception of exactly this class that `call` raises, its fields as given."""
    try:
        call()
    except openai.APIError as error:
        caught = error
    except anthropic.APIError as error:
        caught = error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    expect(type(caught) is kind, caught)
    for name, value in fields.items():
        expect(getattr(caught, name) == value, {name: getattr(caught, name)})
    return caught


def run():
    failed = 0
    for function in CHECKS:
        try:
            function()
            print(f"  ok      {function.__name__}", flush=True)
        except Exception as error:  # noqa: BLE001  every check is run and reported
            failed += 1
            print(f"  FAILED  {function.__name__}: {type(error).__name__}: {error}", flush=True)
    print(f"  openai {openai.__version__}, anthropic {anthropic.__version__}: {len(CHECKS) - failed} of {len(CHECKS)}")
    return 1 if failed else 0
