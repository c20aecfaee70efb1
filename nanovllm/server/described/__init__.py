"""The description of the server: /openapi.json, and /docs for people.

fields.py    JSON schemas of the fields that bodies have
bodies.py    what each path takes: one line for each, from the names that its parser knows
document.py  the description, made from the routes of the application and these lines
page.py      the description as a page
endpoints.py the two endpoints
"""
