"""cloudbase-init as it is published, on a machine that stands in for Windows: what it does with a seed disk, boot by boot.

Usage: windows.py CONFIGURATION SEED FOLDER [PAGE_FILE]. Prints one JSON object. PAGE_FILE: where the image has its page file.

Of cloudbase-init everything is real: its configuration, its drive search (with mtools), its NoCloud service, its plugins,
their order, and its log on a serial port. Only calls of Windows are made up (`Machine`); those that change something are noted.
"""
import configparser
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from unittest import mock

CONFIGURATION, SEED, FOLDER = sys.argv[1:4]
PAGE_FILE = sys.argv[4] if len(sys.argv) > 4 else "C:\\pagefile.sys"
# What only Windows has. cloudbase-init imports these, and calls none of them below.
for name in ["winioctlcon", "winreg", "wmi", "pywintypes", "win32api", "win32com", "win32com.client", "win32security"]:
    sys.modules[name] = mock.MagicMock()
import ctypes  # noqa: E402

ctypes.windll = mock.MagicMock()

from oslo_config import cfg  # noqa: E402

from cloudbaseinit import conf, init  # noqa: E402
from cloudbaseinit.metadata.services import baseconfigdrive, nocloudservice  # noqa: E402
from cloudbaseinit.metadata.services.osconfigdrive import windows as drives  # noqa: E402
from cloudbaseinit.osutils import base as osutils_base, factory as osutils_factory  # noqa: E402
from cloudbaseinit.utils import hostname as hostnames, log  # noqa: E402
from cloudbaseinit.utils.windows.storage import base as storage_base, factory as storage_factory  # noqa: E402

LABELS = {"C:\\": "Windows", "D:\\": "", "T:\\": "Temporary Storage"}


class Machine(osutils_base.BaseOSUtils):
    """State of the machine that survives a reboot."""

    def __init__(self):
        self.name, self.page_files, self.users, self.groups = "WIN-TEMPLATE", [(PAGE_FILE, 0, 0)], {}, []
        self.adapters = {"52:54:00:12:34:56": "Ethernet", "56:54:00:12:34:56": "Ethernet 2"}
        self.values, self.calls, self.reboots = {}, [], 0
        self.san_policy = storage_base.SAN_POLICY_OFFLINE_SHARED

    def note(self, *call):
        self.calls.append(list(call))

    # Disks. mtools of Windows has another ending.
    def get_physical_disks(self):
        return [os.path.join(FOLDER, "system.raw"), SEED]

    def execute_process(self, args, shell=True, decode_output=False):
        program = os.path.basename(args[0]).removesuffix(".exe")
        done = subprocess.run([program, *args[1:]], stdin=subprocess.DEVNULL, capture_output=True)
        return done.stdout, done.stderr, done.returncode

    def get_logical_drives(self):
        return list(LABELS)

    def get_volume_label(self, drive):
        return LABELS[drive]

    def get_page_files(self):
        return self.page_files

    def set_page_files(self, page_files):
        self.page_files = page_files
        self.note("page files", page_files)

    def enable_trim(self, enable):
        self.note("trim", enable)

    # Its storage manager.
    def get_san_policy(self):
        return self.san_policy

    def set_san_policy(self, policy):
        self.san_policy = policy
        self.note("disks online", policy == storage_base.SAN_POLICY_ONLINE)

    # Identity.
    def set_host_name(self, name):
        self.name = name
        self.note("name", name)
        return True

    def user_exists(self, name):
        return name in self.users

    def create_user(self, name, password, password_expires=False):
        self.users[name] = password
        self.note("user", name)

    def set_user_password(self, name, password, password_expires=False):
        self.users[name] = password

    def create_user_logon_session(self, *_, **__):
        return 1

    def close_user_logon_session(self, _):
        pass

    def add_user_to_local_group(self, name, group):
        self.note("group", name, group)

    def get_user_home(self, name):
        return os.path.join(FOLDER, "guest", name)

    # Network.
    def get_network_adapter_name_by_mac_address(self, mac):
        return self.adapters[mac.lower()]

    def rename_network_adapter(self, old, new):
        mac = next(mac for mac, name in self.adapters.items() if name == old)
        self.adapters[mac] = new
        self.note("card", old, new)

    def enable_network_adapter(self, name, enabled):
        self.note("enable", name, enabled)

    # Of cloudbase-init itself.
    def check_os_version(self, *_):
        return True

    def set_config_value(self, name, value, section=None):
        self.values[section, name] = value

    def get_config_value(self, name, section=None):
        return self.values.get((section, name))

    def reboot(self):
        self.reboots += 1
        self.note("reboot")

    def terminate(self):
        self.note("end")


def service_of(machine):
    """What the NoCloud service alone reads of the seed disk."""
    service = nocloudservice.NoCloudConfigDriveService()
    if not service.load():
        return None
    network = service.get_network_details_v2()
    found = {
        "files": sorted(os.listdir(service._metadata_path)),
        "instance": service.get_instance_id(),
        "name": service.get_host_name(),
        "keys": service.get_public_keys(),
        "user data": service.get_decoded_user_data().decode(),
        "cards": [[link.name, link.mac_address, link.enabled] for link in network.links],
        "addresses": len(network.networks),
    }
    service.cleanup()
    return found


def boots_of(machine):
    """Boots until one ends without a reboot; the calls of each."""
    boots = []
    while len(boots) < 5:
        (machine.calls, before) = ([], machine.reboots)
        init.InitManager().configure_host()
        boots.append(machine.calls)
        if machine.reboots == before:
            break
    return boots


class Complaints(logging.Handler):
    """Errors that cloudbase-init writes to its log."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def files_below(folder):
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with open(path) as file:
                found[os.path.relpath(path, FOLDER)] = file.read()
    return found


def unknown_options():
    """Options of the file that cloudbase-init does not know."""
    file = configparser.ConfigParser(interpolation=None, default_section="none")
    file.read(CONFIGURATION)
    unknown = []
    for section in file.sections():
        for option in file[section]:
            try:
                getattr(conf.CONF if section == "DEFAULT" else conf.CONF[section], option)
            except (cfg.NoSuchOptError, cfg.NoSuchGroupError):
                unknown.append(f"{section}.{option}")
    return unknown


END = "the end of the test"


def serial_port():
    """A serial port, and a thread that reads what comes out of it, until that is `END`."""
    reader, port = pty.openpty()
    heard = []

    def hear():
        while END.encode() not in b"".join(heard[-2:]):
            heard.append(os.read(reader, 4096))

    hearing = threading.Thread(target=hear, daemon=True)
    hearing.start()
    return os.ttyname(port), hearing, heard


def main():
    with open(os.path.join(FOLDER, "system.raw"), "wb") as disk:
        disk.write(bytes(1 << 20))
    conf.CONF(["--config-file", CONFIGURATION], project="cloudbase-init")
    unknown = unknown_options()
    port, hearing, heard = serial_port()
    settings = conf.CONF.logging_serial_port_settings.replace("COM1", port)
    conf.CONF.set_override("logging_serial_port_settings", settings)
    conf.CONF.set_override("log_dir", FOLDER)
    log.setup("cloudbaseinit")
    complaints = Complaints()
    logging.getLogger("cloudbaseinit").addHandler(complaints)
    machine = Machine()
    with (
        mock.patch.object(osutils_factory, "get_os_utils", lambda: machine),
        mock.patch.object(storage_factory, "get_storage_manager", lambda: machine),
        mock.patch.object(baseconfigdrive.factory, "get_config_drive_manager", drives.WindowsConfigDriveManager),
        mock.patch.object(hostnames.platform, "node", lambda: machine.name),
    ):
        service = service_of(machine)
        # Plugins say which system they are for.
        with mock.patch.object(sys, "platform", "win32"):
            boots = boots_of(machine)
    logging.getLogger("cloudbaseinit").error(END)
    hearing.join(30)
    files = files_below(os.path.join(FOLDER, "guest"))
    console = b"".join(heard).decode().splitlines()
    found = {"unknown": unknown, "service": service, "boots": boots, "files": files, "console": console}
    print(json.dumps({**found, "errors": complaints.lines[:-1]}))


main()
