"""The messages between consumers and nodes, the connection that carries them, and the domain's vocabulary.

It can be understood, tested and used without a database and without Spark: it imports no other package of
sublet, and every other may import it. See README.md.
"""
