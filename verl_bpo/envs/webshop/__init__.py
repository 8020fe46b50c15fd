"""WebShop (https://github.com/princeton-nlp/WebShop) as an environment: its shop, goals and reward, in process.

Written from the published definition, without its web server, its Java index or torch. One module an idea:
``catalogue`` (products, prices, what all episodes share), ``goals``, ``search``, ``pages`` (what a page shows and offers),
``reward``, ``environment`` (what an action does).
"""

from verl_bpo.envs.webshop.environment import WebshopEnvironment

__all__ = ["WebshopEnvironment"]
