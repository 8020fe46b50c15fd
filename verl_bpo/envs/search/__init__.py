"""Questions over a corpus, answered by searching: Search-R1's form of files and servers, or invented facts.

One module an idea: ``questions`` (parquet files), ``retrievers`` (BM25 over a file, or a server), ``scoring`` (exact match and
F1), ``environment`` (what an action does), ``generate`` (questions of several hops over invented people).
"""

ENVIRONMENT = "environment:SearchEnvironment"
INSTALL = "pip install '.[search]' in verl_bpo's folder"
