"""WebShop: shopping on simulated pages; set WEBSHOP_DATA to the benchmark's data folder.

Its shop, goals and reward (https://github.com/princeton-nlp/WebShop), in process: written from the published definition,
without its web server, its Java index or torch. One module an idea: ``products``, ``catalogue`` (prices, what all
episodes share), ``goals``, ``search``, ``pages`` (what a page shows and offers), ``reward``, ``environment`` (what an action
does).
"""

ENVIRONMENT = "environment:WebshopEnvironment"
INSTALL = "pip install '.[webshop]' in verl_bpo's folder"
