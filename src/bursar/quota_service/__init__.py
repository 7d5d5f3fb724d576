"""The quota service, `bursar quota-service`: it decides requests at the gate `quota` as a client of the public API.

It holds no state that outlives it: the server charges and refuses in the transaction of each decision, so a service
that is killed, absent or started twice decides nothing twice and loses nothing. It imports only the SDK and rules of
`core`. Read `decider.py` first: which requests to approve, pure and without a connection.
"""
