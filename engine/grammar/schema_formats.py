"""The formats of strings that are enforced, as regular expressions of ECMA-262.

Knows the RFCs behind the names. An expression matches whole strings; it may allow less than the RFC does, never more. Called by
`json_schema`, which puts them in the place of `format`.
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
# Without leap seconds: whether one may be depends on the offset.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME_PARTS = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAY_PARTS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LAST32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [f"(?:{_H16}:){{6}}{_LAST32}", f"::(?:{_H16}:){{5}}{_LAST32}"]
    + [f"(?:(?:{_H16}:){{0,{4 - n}}}{_H16})?::(?:{_H16}:){{{n}}}{_LAST32}" for n in range(4, -1, -1)]
    + [f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}", f"(?:(?:{_H16}:){{0,6}}{_H16})?::"]
)
# Without two hyphens side by side: `xn--` begins a label that is encoded, and others like it are reserved.
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PERCENT = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_QUERY = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_PERCENT})*"
_AUTHORITY = (
    rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PERCENT})*@)?"
    rf"(?:\[(?:{_IPV6})\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PERCENT})*)(?::[0-9]*)?"
)
_PATH = rf"(?:/{_SEGMENT}*)*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}{_PATH}|/(?:{_SEGMENT}+{_PATH})?|{_SEGMENT}+{_PATH})(?:\?{_QUERY})?(?:#{_QUERY})?"
)
_NO_COLON = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PERCENT})"
_REFERENCE = rf"(?:/(?:{_SEGMENT}+{_PATH})?|{_NO_COLON}+{_PATH})?(?:\?{_QUERY})?(?:#{_QUERY})?"
_VARIABLE = r"[A-Za-z0-9_]+(?::[1-9][0-9]{0,3}|\*)?"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

_WHOLE: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[Tt]{_TIME}",),
    "duration": (f"P(?:{_DAY_PARTS}(?:T{_TIME_PARTS})?|T{_TIME_PARTS}|[0-9]+W)",),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "hostname": (rf"{_LABEL}(?:\.{_LABEL})*", r"[^.]{1,63}(?:\.[^.]{1,63})*", r"[\s\S]{1,253}"),
    "email": (rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])", r"[^@]{1,64}@[\s\S]{1,255}"),
    "uuid": ("[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",),
    "uri": (_URI,),
    "uri-reference": (f"{_URI}|{_REFERENCE}",),
    "uri-template": (rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",),
    "json-pointer": (_POINTER,),
    "relative-json-pointer": (f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",),
}
# The international forms allow more than these; what is written is valid for both.
_WHOLE |= {f"idn-{name}": _WHOLE[name] for name in ("email", "hostname")}
_WHOLE |= {name.replace("uri", "iri"): _WHOLE[name] for name in ("uri", "uri-reference")}

FORMATS: dict[str, tuple[str, ...]] = {name: tuple(f"^(?:{each})$" for each in parts) for name, parts in _WHOLE.items()}
# Formats of the standard that no regular expression covers.
REFUSED_FORMATS = frozenset({"regex"})
