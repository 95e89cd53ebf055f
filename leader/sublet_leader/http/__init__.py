"""A node's HTTP port: probes, metrics, the JSON API and the web page.

It is for people and their tools, and must never slow down consumers. So it has a thread and a loop of its own,
uvicorn's, which disconnects slow clients, and a bounded number of threads; it reads the node's memory without calling
the node's loop, and the database over connections of its own. Without requests it does next to nothing.

`server` implements HTTP within bounds, without any code of sublet's domain: a request goes to `app`, Starlette's table
of routes. Endpoints that may block are plain functions, in Starlette's threads; `async` endpoints only read memory.
`auth` checks who calls; `responses` has the form of answers; `query_fields` and `body_fields` parse requests;
`settings` has the bounds. `probes_and_metrics` reports the node's health, as `sublet_leader.observe` evaluates it;
`groups`, `group_actions` and `nodes` serve the page and scripts, and `static` has the page itself, without external
resources.
"""
