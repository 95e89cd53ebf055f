"""Who leads, who gets what: the deployable service.

A **node** is a process; in it live the **leaders** of some groups, one per group in the whole deployment, elected
through a conditional write in Postgres. A leader lends the group's streams to borrowers, takes them back, and writes
their progress down, always under its **term**. Nothing it remembers is needed by its successor: the rows tell.

`election` decides who leads, `allocation` who should hold what, `group` is one group's leader, `node_machine` joins
them: all pure. `node` is the shell around it: it commits what the machine wants written and only then sends. This
package never imports `borrower`.
"""
