//! `docs/how-to/windows.md`: its commands run in one shell, in its order, with its catalog, against a daemon without guests. And the
//! files of `deploy/windows` that it hands out. Nothing here is run on Windows.
//!
//! Invariant: each command of the host that the page shows is run, and the first one that fails ends the test.
#![allow(clippy::unwrap_used)]

use spillway_testkit::daemon::Daemon;
use spillway_testkit::windows::{FileLayout, hive, ntfs_volume};
use spillway_testkit::{disk, has_program, skip};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

const PAGE: &str = include_str!("../docs/how-to/windows.md");
/// Where the page has the store of scratch disks.
const TEMP: &str = "/var/lib/spillway/temp";
/// Where the identifier of a scratch disk's only partition is: in the first entry of its GPT.
const PARTITION_GUID_AT: u64 = 1024 + 16;

fn deploy(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/windows").join(name);
    std::fs::read_to_string(path).unwrap()
}

/// Fenced blocks of the page: what follows the fence, and the text.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let fenced = PAGE.split("```").skip(1).step_by(2);
    fenced.map(|block| block.split_once('\n').unwrap()).collect()
}

/// Tools that make a disk of Windows.
fn has_tools() -> bool {
    let missing = [
        ("qemu-img", "qemu-utils"),
        ("hivexregedit", "libwin-hivex-perl"),
        ("hivexget", "libhivex-bin"),
        ("ntfsinfo", "ntfs-3g"),
    ]
    .into_iter()
    .find(|(program, _)| !has_program(program));
    if let Some((program, package)) = missing {
        skip(&format!("{program} is not installed (Debian: {package}): run 'make install-deps'"));
    }
    missing.is_none()
}

/// A disk with so much of Windows that a check takes it for Windows.
fn windows(dir: &Path) -> PathBuf {
    let tree = dir.join("tree/Windows/System32/config");
    std::fs::create_dir_all(&tree).unwrap();
    let system = "[\\Select]\n\"Current\"=dword:00000001\n\n[\\ControlSet001\\Services\\netkvm]\n\"Start\"=dword:00000003\n";
    let software = "[\\Microsoft\\Windows NT\\CurrentVersion]\n\"ProductName\"=\"Windows Server 2025\"\n";
    for (name, content) in [("SYSTEM", system), ("SOFTWARE", software)] {
        std::fs::write(tree.join(name), hive(content).unwrap()).unwrap();
    }
    let raw = dir.join("windows.raw");
    ntfs_volume(&raw, 8 << 20, &dir.join("tree"), FileLayout::Whole, &[]).unwrap();
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2", "windows.raw", "windows.qcow2"]).current_dir(dir);
    assert!(convert.status().unwrap().success());
    raw
}

#[test]
fn the_page_works_as_it_is_written_as_far_as_there_is_no_guest() {
    if !has_tools() {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    windows(dir.path());
    let programs = disk::program().unwrap();
    let daemon = Daemon::start(&programs, dir.path(), &["--hypervisor", "none"]).unwrap();
    let mut script = "set -euo pipefail\ntrap 'echo \"FAILED ($?): $BASH_COMMAND\"' ERR\n".to_owned();
    for (kind, text) in blocks() {
        match kind {
            "sh" => script += text,
            "toml" => std::fs::write(dir.path().join("windows.toml"), text).unwrap(),
            // In the guest, or asked of it.
            "powershell" | "text" => {}
            other => panic!("the page has a block of '{other}': say here whether it is run"),
        }
    }
    let temp = dir.path().join("temp");
    assert!(script.contains(TEMP));
    let script = script.replace(TEMP, temp.to_str().unwrap());
    let path = format!("{}:{}", programs.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-c", &format!("exec 2>&1\n{script}")]).current_dir(dir.path()).env("PATH", path);
    let done = shell.env("SPILLWAY_SOCKET", dir.path().join("sock")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    // What the page promises of the pool.
    let spec = daemon.json(&["catalog", "show", "desk"]).unwrap()["spec"].clone();
    assert_eq!(
        (&spec["scratch_format"], &spec["reset"]),
        (&"ntfs:Temporary Storage".into(), &serde_json::Value::Null)
    );
    let label = spec["scratch_format"].as_str().unwrap().strip_prefix("ntfs:").unwrap();
    assert!(deploy("cloudbase-init.conf").contains(&format!("\npage_file_volume_labels={label}\n")));
    assert!(deploy("self-test.ps1").contains(&format!("\n$label = '{label}'\n")));
    daemon.ask(&["machine", "start", "desk-001", "--wait"]).unwrap();
    the_registry_knows_the_scratch_disk(&temp);
}

/// Windows gives the partition the letter that `page-file.reg` says, by its GUID.
fn the_registry_knows_the_scratch_disk(temp: &Path) {
    let scratch = std::fs::read_dir(temp.join("scratch")).unwrap().next().unwrap().unwrap().path();
    let mut guid = [0; 16];
    std::fs::File::open(scratch).unwrap().read_exact_at(&mut guid, PARTITION_GUID_AT).unwrap();
    let device: Vec<String> = b"DMIO:ID:".iter().chain(&guid).map(|byte| format!("{byte:02x}")).collect();
    let registry = deploy("page-file.reg");
    assert!(registry.contains(&format!("\"\\\\DosDevices\\\\T:\"=hex:{}\n", device.join(","))), "{registry}");
}

/// hivex takes it as regedit would, and the page file is where cloudbase-init wants it.
#[test]
fn the_page_files_place_is_what_cloudbase_init_sets_itself() {
    if !has_tools() {
        return;
    }
    let registry = deploy("page-file.reg");
    let keys = registry.split_once("\n\n").unwrap().1.replace("[HKEY_LOCAL_MACHINE\\SYSTEM", "[");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("SYSTEM");
    std::fs::write(&path, hive(&keys).unwrap()).unwrap();
    let key = "\\CurrentControlSet\\Control\\Session Manager\\Memory Management";
    let done = Command::new("hivexget").arg(&path).args([key, "PagingFiles"]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim_end(), "T:\\pagefile.sys 0 0");
}

/// Lists the settings. Microsoft's schema is part of its Windows ADK, and cannot be here: what is compared is a list of our own.
const ANSWERS: &str = r#"
import json, sys
import xml.etree.ElementTree as tree
U = "{urn:schemas-microsoft-com:unattend}"
ACTION = "{http://schemas.microsoft.com/WMIConfig/2002/State}action"
root = tree.parse(sys.argv[1]).getroot()
assert root.tag == U + "unattend", root.tag
found = []
def settings(element, path):
    assert element.tag.startswith(U), element.tag
    path += "/" + element.tag[len(U):]
    if element.tag[len(U):] == "LocalAccount": assert element.attrib == {ACTION: "add"}, element.attrib
    else: assert not element.attrib, (path, element.attrib)
    if len(element): [settings(child, path) for child in element]
    else: found.append([path, element.text])
for part in root:
    assert part.tag == U + "settings" and list(part.attrib) == ["pass"], part.tag
    for component in part:
        about = dict(component.attrib)
        name = about.pop("name")
        assert about == {"processorArchitecture": "amd64", "publicKeyToken": "31bf3856ad364e35", "language": "neutral",
                         "versionScope": "nonSxS"}, about
        for child in component: settings(child, part.attrib["pass"] + "/" + name)
print(json.dumps(found))
"#;

#[test]
fn the_answer_file_says_what_it_is_for_and_nothing_else() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/windows/unattend.xml");
    let done = Command::new("python3").args(["-c", ANSWERS]).arg(path).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let found: Vec<(String, String)> = serde_json::from_slice(&done.stdout).unwrap();
    let shell = "oobeSystem/Microsoft-Windows-Shell-Setup";
    let locale = "oobeSystem/Microsoft-Windows-International-Core";
    let mut expected = vec![
        ("generalize/Microsoft-Windows-PnpSysprep/PersistAllDeviceInstalls".to_owned(), "true"),
        ("specialize/Microsoft-Windows-Shell-Setup/ComputerName".to_owned(), "*"),
    ];
    for name in ["InputLocale", "SystemLocale", "UILanguage", "UserLocale"] {
        expected.push((format!("{locale}/{name}"), "en-US"));
    }
    for (name, value) in [
        ("OOBE/HideEULAPage", "true"),
        ("OOBE/HideLocalAccountScreen", "true"),
        ("OOBE/HideOnlineAccountScreens", "true"),
        ("OOBE/HideWirelessSetupInOOBE", "true"),
        ("OOBE/ProtectYourPC", "3"),
        ("TimeZone", "@TIMEZONE@"),
        ("UserAccounts/AdministratorPassword/Value", "@PASSWORD@"),
        ("UserAccounts/AdministratorPassword/PlainText", "true"),
        ("UserAccounts/LocalAccounts/LocalAccount/Name", "user"),
        ("UserAccounts/LocalAccounts/LocalAccount/Group", "Users"),
        ("UserAccounts/LocalAccounts/LocalAccount/Password/Value", "@PASSWORD@"),
        ("UserAccounts/LocalAccounts/LocalAccount/Password/PlainText", "true"),
    ] {
        expected.push((format!("{shell}/{name}"), value));
    }
    let found: Vec<(String, &str)> =
        found.iter().map(|(path, value)| (path.clone(), value.as_str())).collect();
    assert_eq!(found, expected);
}

#[test]
fn the_page_says_that_it_was_not_run_on_windows() {
    assert!(PAGE.contains("not run on Windows by us"));
    // What Setup or a reset would undo otherwise.
    for words in [
        "start= demand",
        "start= auto",
        "PreventDeviceEncryption",
        "manage-bde -status C:",
        "Disable-LocalUser",
    ] {
        assert!(blocks().iter().any(|(kind, text)| *kind == "powershell" && text.contains(words)), "{words}");
    }
    let pool = blocks().into_iter().find(|(kind, _)| *kind == "toml").unwrap().1;
    assert!(pool.contains("\nfirmware = ") && pool.contains("\ntpm = "), "{pool}");
    for file in ["cloudbase-init.conf", "unattend.xml", "page-file.reg", "self-test.ps1"] {
        assert!(PAGE.contains(&format!("`{file}`")) && !deploy(file).is_empty(), "{file}");
    }
}
