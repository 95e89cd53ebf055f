"""Messages between processes as frozen values, and their codecs.

`borrower_leader` has the messages of borrowers and leaders and `borrower_leader_codec` their wire form; `feed` and
`member_reads` have both for feeds and fetches. What cannot be decoded is an error for its sender, and has no effect on
any other.
"""
