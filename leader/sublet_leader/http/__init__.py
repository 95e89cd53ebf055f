"""A node's HTTP port: probes, metrics, the JSON API and the web page.

It is for people and their tools, and must never cost consumers anything. So it lives on threads of its own, a bounded
number of them, which give up on whoever is slow; it reads what the node's loop has in memory without asking the loop,
and the database over connections of its own. Where nothing asks, it does next to nothing.

`server` speaks HTTP and knows nothing of sublet: a request goes to `app`, a table of functions that answer with a
`Response` (`responses`). `probes` tells how the node is, as `sublet_leader.observe` judges and counts it; `groups`,
`group_actions` and `nodes` answer the page and whoever has scripts, and `static` has the page itself, without anything
from elsewhere.
"""
