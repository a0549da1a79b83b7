"""`registry plugins`: the plugins in use, and the components that family files may name."""

from __future__ import annotations

from mlx_experts.plugins.manager import KINDS, plugins_in_use, registered
from mlx_experts.registry.cli.common import Json, Plugins, print_json, print_table


def plugins(json: Json = False, plugin: Plugins = None) -> None:
    """List the plugins that are loaded, and the names that family files may use of each kind.

    Example: registry plugins --plugin my_pieces.py
    """
    loaded = plugins_in_use()
    names = {kind: sorted(registered(kind)) for kind in KINDS}
    if json:
        print_json({"plugins": loaded, "components": names})
        return
    if loaded:
        rows = [(each["plugin"], each["module"], each["hooks"]) for each in loaded]
        print_table("plugins", ("plugin", "module", "hooks"), rows)
    else:
        print("no plugin is loaded beside the built-in ones")
    print_table("components", ("kind", "names"), [(kind, ", ".join(each)) for kind, each in names.items()])
