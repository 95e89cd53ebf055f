"""Messages between processes as frozen values, and their codecs.

`borrower_leader` has the messages of borrowers and leaders, `borrower_leader_codec` their wire form, `wire_fields` the
fields that several of them have; `feed_messages` and `member_reads` have both for feeds and fetches. What cannot be
decoded is an error for its sender, and has no effect on any other.
"""
