"""A node's HTTP port: probes, metrics, the JSON API and the web page.

It is for people and their tools, and must never cost consumers anything. So it has a thread and a loop of its own,
uvicorn's, which gives up on whoever is slow, and a bounded number of threads; it reads what the node's loop has in
memory without asking that loop, and the database over connections of its own. Where nothing asks, it does next to
nothing.

`server` speaks HTTP within bounds and knows nothing of sublet: a request goes to `app`, Starlette's table of functions.
Those that may block are plain functions, in Starlette's threads; `async` are those that only look at memory.
`responses` has the form of answers; `query_fields` and `body_fields` read what was asked. `probes` reports how the node
is, as `sublet_leader.observe` judges and counts it; `groups`, `group_actions` and `nodes` answer the page and whoever
has scripts, and `static` has the page itself, without anything from elsewhere.
"""
