//! The description of a libvirt domain whose disk is one of ours: what is changed in it, and the mark that says so. Owns the mark's
//! namespace. Text in, text out; asks neither libvirt nor the daemon.
//!
//! Invariant: outside of what is changed, the text stays byte for byte. The mark contains the description from before.

use roxmltree::{Document, Node};
use spillway_api::Name;
use std::ops::Range;
use std::path::Path;

/// Namespace of the mark.
pub const NAMESPACE: &str = "urn:spillway:disk";
/// Longest description that is read.
pub const MOST_BYTES: u64 = 16 << 20;
/// Queues that the daemon offers for such a disk. QEMU would ask for one for each processor.
const MOST_QUEUES: u32 = 16;

/// A domain's mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Catalog of the machine whose disk the domain has.
    pub catalog: Name,
    /// The description from before.
    pub original: String,
}

/// What is known of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// UUID of the domain, in lower case.
    pub uuid: String,
    /// Its mark, if its disk is one of ours.
    pub mark: Option<Mark>,
    /// Sockets of its disks that others serve.
    sockets: Vec<String>,
}

impl Domain {
    /// Reads a description.
    pub fn read(text: &str) -> Result<Domain, String> {
        let document = parse(text)?;
        let domain = document.root_element();
        let uuid = child(domain, "uuid").and_then(|uuid| uuid.text()).unwrap_or_default().trim();
        let plain = |c: char| c.is_ascii_hexdigit() || c == '-';
        if uuid.len() != 36 || !uuid.chars().all(plain) {
            return Err("it has no UUID".into());
        }
        let mark = child(domain, "metadata")
            .and_then(|data| data.children().find(|node| node.has_tag_name((NAMESPACE, "disk"))));
        let mark = mark.map(read_mark).transpose()?;
        let is_served =
            |node: &Node<'_, '_>| node.has_tag_name("disk") && node.attribute("type") == Some("vhostuser");
        let disks =
            child(domain, "devices").into_iter().flat_map(|devices| devices.children().filter(is_served));
        let path = |disk| child(disk, "source")?.attribute("path").map(str::to_owned);
        Ok(Domain { uuid: uuid.to_ascii_lowercase(), mark, sockets: disks.filter_map(path).collect() })
    }

    /// Whether its disk is that of its own machine. A copy of a domain has the disk of the other.
    pub fn has_own_disk(&self) -> bool {
        let machine = self.machine();
        let folder = |socket: &String| {
            Path::new(socket)
                .parent()
                .and_then(Path::file_name)
                .is_some_and(|folder| folder == machine.as_str())
        };
        self.sockets.iter().any(folder)
    }

    /// Name of the machine that belongs to the domain. It has no other part than the UUID, so that a domain names no machine of
    /// another one.
    pub fn machine(&self) -> Name {
        format!("lv-{}", self.uuid).parse().expect("a UUID is a part of a name")
    }
}

fn read_mark(mark: Node<'_, '_>) -> Result<Mark, String> {
    let catalog = mark.attribute("catalog").unwrap_or_default();
    let catalog = catalog.parse().map_err(|e| format!("its mark names no catalog: {e}"))?;
    let original = mark.children().find(|node| node.has_tag_name((NAMESPACE, "original")));
    let original = original.and_then(|original| original.text()).unwrap_or_default().to_owned();
    Ok(Mark { catalog, original })
}

/// Returns the description with our disk on this socket in place of the disk with this target, or of the first disk.
pub fn adopt(text: &str, target: Option<&str>, catalog: &Name, socket: &Path) -> Result<String, String> {
    let document = parse(text)?;
    let domain = document.root_element();
    if Domain::read(text)?.mark.is_some() {
        return Err("its disk is one of spillway's already".into());
    }
    // Its description becomes a part of what every user of libvirt may read.
    if document.descendants().any(|node| node.attribute("passwd").is_some()) {
        return Err(
            "it has a password for its screen, and its description would show that: take it out of the description first".into()
        );
    }
    let disk = system_disk(domain, target)?;
    let mut changes =
        vec![(disk.range(), our_disk(text, domain, disk, socket)?), shared_memory(text, domain)?];
    changes.push(marked(text, domain, catalog)?);
    changes.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    let mut changed = text.to_owned();
    for (range, new) in changes {
        changed.replace_range(range, &new);
    }
    Ok(changed)
}

type Change = (Range<usize>, String);

fn system_disk<'a, 'i>(domain: Node<'a, 'i>, target: Option<&str>) -> Result<Node<'a, 'i>, String> {
    let devices = child(domain, "devices").ok_or("it has no devices")?;
    let name = |disk: Node<'_, '_>| child(disk, "target").and_then(|t| t.attribute("dev").map(str::to_owned));
    let is_disk = |node: &Node<'_, '_>| {
        node.has_tag_name("disk") && node.attribute("device").is_none_or(|device| device == "disk")
    };
    let mut disks = devices.children().filter(is_disk);
    let found = match target {
        None => disks.next().ok_or("it has no disk")?,
        Some(target) => disks
            .find(|disk| name(*disk).as_deref() == Some(target))
            .ok_or_else(|| format!("it has no disk '{target}': see 'virsh domblklist'"))?,
    };
    let bus = child(found, "target").and_then(|target| target.attribute("bus")).unwrap_or_default();
    match bus {
        "virtio" => Ok(found),
        other => Err(format!(
            "its disk is on the bus '{other}': our disks are virtio disks: let its system have the driver, and change the bus to virtio first"
        )),
    }
}

/// Describes our disk. Place and boot order are the earlier one's, so that the guest finds it where it was.
fn our_disk(text: &str, domain: Node<'_, '_>, disk: Node<'_, '_>, socket: &Path) -> Result<String, String> {
    let socket = socket.to_str().ok_or("the path of the disk's socket is not UTF-8")?;
    let vcpus = child(domain, "vcpu").and_then(|vcpu| vcpu.text()?.trim().parse::<u32>().ok()).unwrap_or(1);
    let kept = |name: &str| child(disk, name).map_or(String::new(), |node| text[node.range()].to_owned());
    let (queues, path) = (vcpus.clamp(1, MOST_QUEUES), escape(socket));
    let target = kept("target");
    let rest: String = ["boot", "address"].iter().map(|name| kept(name)).collect();
    Ok(format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='{queues}'/>\
         <source type='unix' path='{path}'><reconnect enabled='yes' timeout='1'/></source>{target}{rest}</disk>"
    ))
}

/// The disk's server maps the memory of the guest.
fn shared_memory(text: &str, domain: Node<'_, '_>) -> Result<Change, String> {
    let ours = "<source type='memfd'/><access mode='shared'/>";
    let Some(backing) = child(domain, "memoryBacking") else {
        let memory = child(domain, "memory").ok_or("it has no memory")?;
        let end = memory.range().end;
        return Ok((end..end, format!("<memoryBacking>{ours}</memoryBacking>")));
    };
    let others = backing.children().filter(|node| node.is_element());
    let others = others.filter(|node| !node.has_tag_name("source") && !node.has_tag_name("access"));
    let others: String = others.map(|node| &text[node.range()]).collect();
    Ok((backing.range(), format!("<memoryBacking>{others}{ours}</memoryBacking>")))
}

fn marked(text: &str, domain: Node<'_, '_>, catalog: &Name) -> Result<Change, String> {
    let original = escape(text);
    let mark = format!(
        "<spillway:disk xmlns:spillway='{NAMESPACE}' catalog='{catalog}'><spillway:original>{original}</spillway:original></spillway:disk>"
    );
    if let Some(metadata) = child(domain, "metadata") {
        let whole = &text[metadata.range()];
        return Ok(match whole.rfind("</") {
            Some(end) => {
                let at = metadata.range().start + end;
                (at..at, mark)
            }
            None => (metadata.range(), format!("<metadata>{mark}</metadata>")),
        });
    }
    let name = child(domain, "name").ok_or("it has no name")?;
    let end = name.range().end;
    Ok((end..end, format!("<metadata>{mark}</metadata>")))
}

fn parse(text: &str) -> Result<Document<'_>, String> {
    let document = Document::parse(text).map_err(|e| format!("its description is no XML: {e}"))?;
    match document.root_element().has_tag_name("domain") {
        true => Ok(document),
        false => Err("its description is not a domain's".into()),
    }
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Escapes text and attribute values.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "<domain type='kvm'>
  <name>web &amp; mail</name>
  <uuid>11111111-2222-4333-8444-55555555555A</uuid>
  <memory unit='KiB'>1048576</memory>
  <vcpu placement='static'>4</vcpu>
  <devices>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='/images/web.qcow2'/>
      <target dev='vda' bus='virtio'/>
      <boot order='1'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>
    <disk type='file' device='disk'><target dev='vdb' bus='virtio'/></disk>
  </devices>
</domain>
";

    fn adopted(text: &str) -> String {
        adopt(text, None, &"vms".parse().unwrap(), Path::new("/run/a&b/disk.sock")).unwrap()
    }

    #[test]
    fn the_disk_is_ours_and_everything_else_as_it_was() {
        let text = adopted(PLAIN);
        let domain = Domain::read(&text).unwrap();
        assert_eq!(domain.machine().as_str(), "lv-11111111-2222-4333-8444-55555555555a");
        let mark = domain.mark.unwrap();
        assert_eq!(mark.catalog.as_str(), "vms");
        assert_eq!(mark.original, PLAIN, "byte for byte");
        for part in [
            "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='4'/><source type='unix' path='/run/a&amp;b/disk.sock'>",
            "<target dev='vda' bus='virtio'/><boot order='1'/><address type='pci' domain='0x0000' bus='0x04'",
            "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
            "<disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>",
            "<disk type='file' device='disk'><target dev='vdb' bus='virtio'/></disk>",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!Domain::read(&text).unwrap().has_own_disk(), "the socket is another machine's");
        let socket = "/run/lv-11111111-2222-4333-8444-55555555555a/disk.sock";
        let own = adopt(PLAIN, None, &"vms".parse().unwrap(), Path::new(socket)).unwrap();
        assert!(Domain::read(&own).unwrap().has_own_disk());
        let copy = own.replace("<uuid>11111111", "<uuid>21111111");
        assert!(!Domain::read(&copy).unwrap().has_own_disk(), "that of a copy is the other's");
        let other = adopt(PLAIN, Some("vdb"), &"vms".parse().unwrap(), Path::new("/s")).unwrap();
        assert!(other.contains("<source file='/images/web.qcow2'/>\n      <target dev='vda'"), "{other}");
        assert!(other.contains("path='/s'"), "{other}");
    }

    #[test]
    fn what_there_is_of_memory_and_marks_of_others_stays() {
        let with = |new: &str| PLAIN.replace("  <vcpu", &format!("  {new}\n  <vcpu"));
        let text = adopted(&with("<memoryBacking><hugepages/><source type='anonymous'/></memoryBacking>"));
        let expected =
            "<memoryBacking><hugepages/><source type='memfd'/><access mode='shared'/></memoryBacking>";
        assert!(text.contains(expected), "{text}");
        let text = adopted(&with("<metadata><o:os xmlns:o='urn:o'/></metadata>"));
        assert!(text.contains("<metadata><o:os xmlns:o='urn:o'/><spillway:disk"), "{text}");
        let text = adopted(&with("<metadata/>"));
        assert!(text.contains("<metadata><spillway:disk"), "{text}");
    }

    #[test]
    fn what_cannot_be_adopted_is_refused_in_words() {
        let refused =
            |text: &str, target| adopt(text, target, &"vms".parse().unwrap(), Path::new("/s")).unwrap_err();
        assert!(refused(&adopted(PLAIN), None).contains("already"));
        let graphics = "<graphics type='vnc' passwd='sesame'/></devices>";
        assert!(refused(&PLAIN.replace("</devices>", graphics), None).contains("a password"));
        assert!(refused(PLAIN, Some("vdz")).contains("no disk 'vdz'"));
        assert!(refused(&PLAIN.replace("bus='virtio'", "bus='sata'"), None).contains("bus 'sata'"));
        assert!(refused("<network/>", None).contains("not a domain's"));
        assert!(refused("<domain>", None).contains("no XML"));
        assert!(refused(&PLAIN.replace("11111111-", ""), None).contains("no UUID"));
    }
}
