"""A node's HTTP port: probes, metrics, the JSON API and the web page.

It is for people and their tools, and must never cost consumers anything. So it lives on threads of its own, a bounded
number of them, which give up on whoever is slow; it reads what the node's loop has in memory without asking the loop,
and the database over connections of its own. Where nothing asks, it does next to nothing.

`server` and `handler` speak HTTP and know nothing of sublet: a request goes to `routes`, a table of functions that
answer with a `Response`. `probes` tells how the node is (judged in `leader.health`, where gRPC's health service reads
it as well), `metrics_page` renders what `counted` has counted on the way and `collector` looks up when it is asked,
`api_*` answer the page and whoever has scripts, and `static` has the page itself, without anything from elsewhere.
"""
