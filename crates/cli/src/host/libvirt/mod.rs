//! `spillway libvirt`: disposable disks for domains that libvirt's users have made. Owns the calls of virsh.
//!
//! Invariant: a domain is changed only while it is off, and its earlier description is in the new one before anything else is done.

mod description;
pub mod hook;

use super::Daemon;
use super::words::size;
use crate::args::settings::DiskOptions;
use crate::error::{Exit, Failure};
use clap::{Args, Subcommand};
use description::Domain;
use serde_json::json;
use spillway_api::client::Client;
use spillway_api::{
    Action, Catalog, CatalogSpec, Empty, HostDetails, ImageRef, MachineAction, MachineDetails, Name,
    NewCatalog, NewMachine, Page, Phase, Selector, VmmKind, bounds,
};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const EXAMPLES: &str = "\
Examples:
  spillway image import web /var/lib/libvirt/images/web.qcow2 --format qcow2
  spillway libvirt adopt web --image web --ram 512M --overflow 8G
  virsh start web
  spillway libvirt release web

libvirt must call the program when domains start and end. It looks for hooks when it starts:
  mkdir -p /etc/libvirt/hooks/qemu.d
  ln -s /usr/bin/spillway /etc/libvirt/hooks/qemu.d/spillway
  systemctl restart libvirtd";

/// Where libvirt looks for hooks.
const HOOK: &str = "/etc/libvirt/hooks/qemu.d/spillway";
/// How long the daemon may take to start or end a disk, in seconds.
const PATIENCE_SECONDS: u64 = 30;

/// What to do with libvirt's domains.
#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Give a domain that is off a disposable disk in place of its system disk
    #[command(after_help = EXAMPLES)]
    Adopt(Box<Adopt>),
    /// Give a domain that is off its earlier disk back, and remove the disposable one
    Release(WhichDomain),
}

/// A domain.
#[derive(Debug, Args)]
pub struct WhichDomain {
    /// Name or UUID of the domain
    domain: String,
    /// libvirt's URI
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
}

/// Which disk a domain gets.
#[derive(Debug, Args)]
pub struct Adopt {
    /// The domain.
    #[command(flatten)]
    which: WhichDomain,
    /// Image that the disk begins with: debian follows the published version, debian:2 does not
    #[arg(
        long,
        value_name = "IMAGE[:VERSION]",
        required_unless_present = "catalog",
        conflicts_with = "catalog"
    )]
    image: Option<ImageRef>,
    /// Catalog of external machines that the disk belongs to [default: one of its own, with the settings below]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["DiskOptions", "LimitOptions", "RateLimit"])]
    catalog: Option<Name>,
    /// Group that libvirt's QEMU has [default: libvirt-qemu]
    #[arg(long, value_name = "GROUP", conflicts_with = "catalog")]
    socket_group: Option<String>,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::DISK_BYTES),
        help = bounds::DISK_BYTES.help("Size of the disk, at least the image's [default: the image's]")
    )]
    size: Option<u64>,
    /// Disk of the domain that is replaced, such as vda [default: the first]
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Settings of the disk.
    #[command(flatten)]
    disk: DiskOptions,
}

/// `spillway libvirt`.
pub fn libvirt(daemon: &Daemon, command: LibvirtCommand) -> Result<(), Failure> {
    daemon.local("'libvirt'")?;
    match command {
        LibvirtCommand::Adopt(adopt) => adopt.run(daemon),
        LibvirtCommand::Release(which) => which.release(daemon),
    }
}

impl Adopt {
    fn run(self, daemon: &Daemon) -> Result<(), Failure> {
        let (name, text) = (self.which.domain.clone(), self.which.description()?);
        let fault = |why: String| Failure::new(Exit::Refused, format!("domain {name}: {why}"));
        let domain = Domain::read(&text).map_err(fault)?;
        // Before anything is made.
        let any = domain.machine();
        description::adopt(&text, self.target.as_deref(), &any, Path::new("/")).map_err(fault)?;
        let (client, machine) = (daemon.client()?, domain.machine());
        // What an earlier attempt has left, whose domain does not have it.
        remove_leftovers(&client, &machine)?;
        let (catalog, is_own) = match (self.catalog, self.image) {
            (Some(catalog), _) => {
                let found: Catalog = client.get(&format!("/v1/catalogs/{catalog}"))?;
                if found.spec.hardware.vmm != VmmKind::External || found.spec.keeps_writes() {
                    let message = format!(
                        "catalog {catalog}: it must have vmm = external, and a reset that is not never"
                    );
                    return Err(Failure::new(Exit::Refused, message));
                }
                (catalog, false)
            }
            (None, Some(image)) => {
                let mut spec = CatalogSpec { image, disk: self.disk.settings(), ..CatalogSpec::defaults() };
                spec.hardware.vmm = VmmKind::External;
                spec.hardware.socket_group = Some(self.socket_group.unwrap_or_else(|| "libvirt-qemu".into()));
                let new = NewCatalog { name: machine.clone(), spec };
                let _: Catalog = client.post("/v1/catalogs", &new)?;
                (machine.clone(), true)
            }
            (None, None) => return Err(Failure::usage("which image? Give it with --image")),
        };
        let new = NewMachine { name: machine.clone(), size_bytes: self.size };
        let made = socket(&client, &catalog, &new)
            .and_then(|socket| {
                description::adopt(&text, self.target.as_deref(), &catalog, &socket).map_err(fault)
            })
            .and_then(|adopted| self.which.define(&adopted));
        if let Err(failure) = made {
            // What was made for it is of no use.
            let _ = remove(&client, &machine, is_own.then_some(&catalog));
            return Err(failure);
        }
        if !Path::new(HOOK).exists() {
            crate::output::complain(
                "notice",
                &format!(
                    "libvirt does not call spillway yet: 'ln -s /usr/bin/spillway {HOOK}', and restart libvirtd"
                ),
            );
        }
        let done = json!({ "domain": name, "machine": machine, "catalog": catalog });
        daemon.show(&done, |_| {
            format!("{name} has a disposable disk, the machine {machine}: what it writes is forgotten when it is turned off\n")
        })
    }
}

impl WhichDomain {
    fn release(&self, daemon: &Daemon) -> Result<(), Failure> {
        let name = &self.domain;
        let text = self.description()?;
        let fault = |why: String| Failure::new(Exit::Refused, format!("domain {name}: {why}"));
        let domain = Domain::read(&text).map_err(fault)?;
        let mark = domain.mark.as_ref().filter(|mark| !mark.original.is_empty());
        let mark = mark.ok_or_else(|| fault("its disk is not one of spillway's".into()))?;
        let original = Domain::read(&mark.original).map_err(fault)?;
        if original.uuid != domain.uuid {
            return Err(fault(
                "it is a copy of another domain, whose description it has: undefine it".into(),
            ));
        }
        // What cannot be reached could not be removed afterwards.
        let (client, machine) = (daemon.client()?, domain.machine());
        let _: HostDetails = client.get("/v1/host")?;
        self.define(&mark.original)?;
        remove(&client, &machine, Some(&mark.catalog).filter(|catalog| **catalog == machine))?;
        daemon.show(&json!({ "domain": name }), |_| format!("{name} has its earlier disk\n"))
    }

    /// Returns the description of a domain, which must be off.
    fn description(&self) -> Result<String, Failure> {
        let state = self.virsh(&["domstate", "--domain", &self.domain])?;
        if state.trim() != "shut off" {
            let message = format!("domain {}: it is '{}': turn it off first", self.domain, state.trim());
            return Err(Failure::new(Exit::Refused, message));
        }
        let about = self.virsh(&["dominfo", "--domain", &self.domain])?;
        if about.lines().any(|line| line.starts_with("Managed save:") && line.ends_with("yes")) {
            let message = format!(
                "domain {0}: its memory is saved and belongs to the disk that it has now: start it, and turn it off, or 'virsh managedsave-remove {0}'",
                self.domain
            );
            return Err(Failure::new(Exit::Refused, message));
        }
        self.virsh(&["dumpxml", "--inactive", "--security-info", "--domain", &self.domain])
    }

    /// Gives a domain this description.
    fn define(&self, text: &str) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::new(Exit::Internal, format!("no temporary file: {e}"));
        // Nobody else may read it: it may contain passwords.
        let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
        let path = file.path().to_string_lossy().into_owned();
        self.virsh(&["define", "--file", &path]).map(drop)
    }

    fn virsh(&self, arguments: &[&str]) -> Result<String, Failure> {
        let mut virsh = Command::new("virsh");
        // Its words are compared.
        virsh.env("LC_ALL", "C").args(["--quiet", "--connect", &self.connect]).args(arguments);
        let done = virsh.output().map_err(|e| {
            Failure::new(Exit::Unavailable, format!("virsh cannot be started (Debian: libvirt-clients): {e}"))
        })?;
        if done.status.success() {
            return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&done.stderr);
        let said: Vec<&str> = said.lines().map(|line| line.trim_start_matches("error: ").trim()).collect();
        Err(Failure::new(Exit::Refused, format!("libvirt: {}", said.join(": "))))
    }
}

/// Removes the machine of a domain that has none, and its own catalog.
fn remove_leftovers(client: &Client, machine: &Name) -> Result<(), Failure> {
    let found: Result<MachineDetails, _> = client.get(&format!("/v1/machines/{machine}"));
    match found {
        Ok(found) => remove(client, machine, Some(machine).filter(|own| **own == found.machine.catalog)),
        Err(_) => {
            // Perhaps only the catalog was made.
            let _: Result<Empty, _> =
                client.delete(&format!("/v1/catalogs/{machine}?with_data=true&force=true"));
            Ok(())
        }
    }
}

/// Adds the machine, and starts its disk once to learn where its socket is.
fn socket(client: &Client, catalog: &Name, new: &NewMachine) -> Result<PathBuf, Failure> {
    let _: MachineDetails = client.post(&format!("/v1/catalogs/{catalog}/machines"), new)?;
    act(client, Action::Start, &new.name)?;
    let machine: MachineDetails = client.get(&format!("/v1/machines/{}", new.name))?;
    act(client, Action::Stop, &new.name)?;
    let run = machine.status.run;
    run.map(|run| run.disk_socket)
        .ok_or_else(|| Failure::new(Exit::Internal, format!("{}: its disk is not served", new.name)))
}

/// Starts or stops a machine, and waits until that is done.
fn act(client: &Client, action: Action, machine: &Name) -> Result<(), Failure> {
    let select = Selector { names: vec![machine.clone()], ..Selector::default() };
    let ask = MachineAction { action, select, force: false, discard_data: false, grace_seconds: None };
    let page: Page<MachineDetails> =
        client.post(&format!("/v1/machine-actions?wait={PATIENCE_SECONDS}"), &ask)?;
    let Some(machine) = page.items.first() else { return Ok(()) };
    let wanted = if action == Action::Start { Phase::Running } else { Phase::Stopped };
    if machine.status.phase == wanted {
        return Ok(());
    }
    let why = machine.status.message.as_deref().unwrap_or("it takes longer than expected");
    Err(Failure::new(Exit::Internal, format!("the disk of {}: {why}", machine.machine.name)))
}

/// Removes a machine, or the catalog that has it alone.
fn remove(client: &Client, machine: &Name, catalog: Option<&Name>) -> Result<(), Failure> {
    let _: Empty = match catalog {
        Some(catalog) => client.delete(&format!("/v1/catalogs/{catalog}?with_data=true&force=true"))?,
        None => {
            act(client, Action::Stop, machine)?;
            client.delete(&format!("/v1/machines/{machine}?with_data=true"))?
        }
    };
    Ok(())
}
