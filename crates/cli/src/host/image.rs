//! `spillway image`.

use super::registry::RemoteRef;
use super::sign::sign;
use super::words::{RESIDENCIES, words};
use super::{Daemon, Limit, progress, table};
use crate::error::{Exit, Failure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use spillway_api::client::Client;
use spillway_api::{
    BootFacts, CachedBootSet, CachedVersion, Catalog, Empty, Finding, GuestSystem, Image, ImageCheck,
    ImageCommit, ImageDetails, ImageDownload, ImageImport, ImageManifest, ImagePull, ImagePush, ImageRef,
    ImageVersion, MachineDetails, Name, Operation, OperationOutcome, Origin, PartitionTable, PushOutcome,
    Residency, SourceFormat, VersionChoice, VersionState, WindowsVersion,
};
use spillway_control::bytes;
use std::path::{Path, PathBuf};

const COMMIT_EXAMPLES: &str = "\
Example:
  spillway machine stop golden-001 --wait
  spillway image commit golden-001 --publish";

const IMPORT_EXAMPLES: &str = "\
Examples:
  spillway image import debian debian-12.qcow2 --format qcow2
  spillway image import desktop --from hub/debian:3
  spillway image import debian https://images.example.org/debian-12.qcow2 --format qcow2 \\
      --sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  spillway image import fedora oci://quay.io/containerdisks/fedora:42 --format qcow2

spillwayd downloads only from hosts that its option --import-from names. A file that ends in .gz or .zst is
unpacked. With oci:// the file is the only one below disk/ in an image of an OCI registry, as KubeVirt's
containerDisks have it, or the only file of an artifact.

With --residency the version is streamed: its disks start at once, and chunks come from the registry
when a disk reads them for the first time. They are kept in a cache on the host (spillwayd
--stream-cache-size). Without --residency the version is copied. Import a streamed version again to
change its residency; catalogs can ask for more ('spillway catalog create --residency').
  spillway image import desktop --from hub/debian:3 --residency boot";

const PUSH_EXAMPLES: &str = "\
Only chunks that the registry lacks are sent. An interrupted push goes on when it is repeated.
The key of --sign is one that 'minisign -G' has made; minisign asks for its password.

Examples:
  spillway image push debian hub
  spillway image push debian:3 hub --sign ~/.minisign/minisign.key";

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import a new version of an image from a file, an address or a registry; the first one creates the image and is published
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(ImportArguments),
    /// Copy a version to a registry
    #[command(after_help = PUSH_EXAMPLES)]
    Push {
        /// The version [default: the published one]
        image: ImageRef,
        /// The registry
        registry: Name,
        /// Sign the version with this secret key of minisign
        #[arg(long, value_name = "KEY")]
        sign: Option<PathBuf>,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
    },
    /// Copy a version from a registry: 'image import' under the same name
    Pull {
        /// The version in the registry, such as hub/debian:3 [default: the highest one]
        image: RemoteRef,
        /// Store for the version [default: the first of class shared, then local]
        #[arg(long)]
        store: Option<Name>,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
    },
    /// Commit the disk of a stopped machine of mode persistent as a new version of an image
    #[command(after_help = COMMIT_EXAMPLES)]
    Commit {
        /// The machine
        machine: Name,
        /// The image [default: the one of its catalog]
        #[arg(long, value_name = "IMAGE")]
        name: Option<Name>,
        /// Publish the version when it is ready
        #[arg(long)]
        publish: bool,
        /// Idempotency key: repeating the commit with it within a day commits nothing more
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
    },
    /// List images
    List {
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Show an image and its versions
    #[command(alias = "versions")]
    Show {
        /// The image
        name: Name,
    },
    /// Publish a version: requests without a version use it
    Publish {
        /// The version, such as debian:2
        image: ImageRef,
    },
    /// Set a tag to a version; without a version, remove the tag
    Tag {
        /// The version, such as debian:2; or the image, to take the tag away
        image: ImageRef,
        /// The tag
        tag: Name,
    },
    /// Read a version again and compare it with its digests
    Verify {
        /// The version [default: the published one]
        image: ImageRef,
    },
    /// Check a version for what breaks its clones: identities in it, missing drivers and services
    Check {
        /// The version [default: the published one]
        image: ImageRef,
        /// Exit with 1 if there is an error or a warning, or no operating system that could be checked
        #[arg(long)]
        strict: bool,
    },
    /// Delete a version, or an image with all versions, that is not in use
    Delete {
        /// The version, or the image
        image: ImageRef,
    },
}

/// What to import, and how.
#[derive(Debug, Args)]
pub struct ImportArguments {
    /// The image
    name: Name,
    /// A disk image on spillwayd's host, which it must be able to read; or its address: https://HOST/PATH, http://HOST/PATH,
    /// oci://REGISTRY/REPOSITORY:TAG, or oci://REGISTRY/REPOSITORY@sha256:HEX
    #[arg(value_name = "FILE|URL")]
    #[arg(required_unless_present = "from", conflicts_with = "from")]
    file: Option<PathBuf>,
    /// Format of the file; it is never guessed
    #[arg(long, value_parser = format(), required_unless_present = "from", conflicts_with = "from")]
    format: Option<SourceFormat>,
    /// With https:// and http://: SHA-256 that the downloaded file must have
    #[arg(long, value_name = "HEX", conflicts_with = "from")]
    sha256: Option<String>,
    /// A version in a registry, such as hub/debian:3, instead of a file. It has the same number here
    #[arg(long, value_name = "REGISTRY/IMAGE[:VERSION]")]
    from: Option<RemoteRef>,
    /// With --from: stream the version, and bring these chunks before a disk needs them: lazy (none), boot (those that
    /// machines read until they are ready), full (all, in the background). Changes the residency of a version that is
    /// streamed already [default: the version is copied]
    #[arg(long, value_name = "HOW", value_parser = words::<Residency>(RESIDENCIES), requires = "from")]
    residency: Option<Residency>,
    /// Store for the version [default: the first of class shared, then local]
    #[arg(long)]
    store: Option<Name>,
    /// Idempotency key: repeating the import with it within a day imports nothing more
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Do not wait for the end
    #[arg(long)]
    no_wait: bool,
}

fn format() -> impl TypedValueParser<Value = SourceFormat> {
    use SourceFormat::{Qcow2, Raw, Vhdx, Vmdk, Vpc};
    let formats = [Raw, Qcow2, Vmdk, Vhdx, Vpc];
    PossibleValuesParser::new(formats.map(SourceFormat::as_str)).map(move |word| {
        *formats.iter().find(|format| format.as_str() == word).expect("no other word is possible")
    })
}

/// Does it.
pub fn image(daemon: &Daemon, command: ImageCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        ImageCommand::Import(arguments) => import(daemon, &client, arguments),
        ImageCommand::Pull { image: RemoteRef { registry, image }, store, no_wait } => {
            let name = image.name.clone();
            let pull = ImagePull { registry, image, store, residency: None };
            let begun: Operation = client.post(&format!("/v1/images/{name}/pulls"), &pull)?;
            attend(daemon, &client, &name, &begun, no_wait)
        }
        ImageCommand::Push { image, registry, sign, no_wait } => {
            push(daemon, &client, &image, &registry, sign.as_deref(), no_wait)
        }
        ImageCommand::Commit { machine, name, publish, key, no_wait } => {
            let name = name.map_or_else(|| image_of(&client, &machine), Ok)?;
            let commit = ImageCommit { machine, publish };
            let at = format!("/v1/images/{name}/commits");
            let begun: Operation = client.post_once(&at, key.as_deref(), &commit)?;
            attend(daemon, &client, &name, &begun, no_wait)
        }
        ImageCommand::List { limit } => {
            let images = client.pages("/v1/images", limit.limit);
            daemon.show_pages(images, ["NAME", "PUBLISHED", "NEWEST", "TAGS"], |image: &Image| {
                let tags = image.tags.iter().map(|(tag, version)| format!("{tag}={version}"));
                let published = image.published.map_or("-".into(), |version| version.to_string());
                let (newest, tags) = (image.newest.to_string(), tags.collect::<Vec<_>>().join(" "));
                vec![[image.name.to_string(), published, newest, tags]]
            })
        }
        ImageCommand::Show { name } => show(daemon, &client, &name),
        ImageCommand::Publish { image } => {
            let choice = VersionChoice { version: version(&image)? };
            let image: Image = client.put(&format!("/v1/images/{}/published", image.name), &choice)?;
            daemon.show(&image, |image| format!("{}:{} is published\n", image.name, choice.version))
        }
        ImageCommand::Tag { image, tag } => {
            let path = format!("/v1/images/{}/tags/{tag}", image.name);
            let changed: Image = match image.version {
                Some(version) => client.put(&path, &VersionChoice { version: version.get() })?,
                None => client.delete(&path)?,
            };
            daemon.show(&changed, |_| match image.version {
                Some(_) => format!("{image} is tagged {tag}\n"),
                None => format!("no version of {image} is tagged {tag} any more\n"),
            })
        }
        ImageCommand::Verify { image } => {
            let version = chosen(&client, &image)?;
            let path = format!("/v1/images/{}/versions/{version}/verify", image.name);
            let begun: Operation = client.post(&path, &())?;
            let done = progress::wait(&client, &begun)?;
            daemon.show(&done, |_| format!("{}:{version} is as it was imported\n", image.name))
        }
        ImageCommand::Check { image, strict } => check(daemon, &client, &image, strict),
        ImageCommand::Delete { image } => {
            let path = match image.version {
                Some(version) => format!("/v1/images/{}/versions/{version}", image.name),
                None => format!("/v1/images/{}", image.name),
            };
            let deleted: Empty = client.delete(&path)?;
            daemon.show(&deleted, |_| format!("{image} is deleted\n"))
        }
    }
}

/// Checks a version.
fn check(daemon: &Daemon, client: &Client, image: &ImageRef, strict: bool) -> Result<(), Failure> {
    let version = chosen(client, image)?;
    let path = format!("/v1/images/{}/versions/{version}/check", image.name);
    let check: ImageCheck = client.get(&path)?;
    daemon.show(&check, told)?;
    let sound = check.faults() == 0 && check.has_system();
    match strict && !sound {
        true => Err(Failure::new(Exit::Found, verdict(&check))),
        false => Ok(()),
    }
}

/// Imports from a registry, from an address, or from a file.
fn import(daemon: &Daemon, client: &Client, arguments: ImportArguments) -> Result<(), Failure> {
    let ImportArguments { name, file, format, sha256, from, residency, store, key, no_wait } = arguments;
    let at = |what: &str| format!("/v1/images/{name}/{what}");
    let url = file.as_ref().and_then(|file| file.to_str()).filter(|text| text.contains("://"));
    let begun: Operation = match (from, url) {
        (Some(RemoteRef { registry, image }), _) => {
            let pull = ImagePull { registry, image, store, residency };
            client.post_once(&at("pulls"), key.as_deref(), &pull)?
        }
        (None, Some(url)) => {
            let format = format.ok_or_else(|| Failure::usage("give the --format of the image"))?;
            let download = ImageDownload { url: url.to_owned(), format, sha256, store };
            client.post_once(&at("downloads"), key.as_deref(), &download)?
        }
        (None, None) if sha256.is_some() => {
            return Err(Failure::usage("--sha256 is for addresses: compare a file with sha256sum"));
        }
        (None, None) => {
            let import = file_import(daemon, file, format, store)?;
            client.post_once(&at("versions"), key.as_deref(), &import)?
        }
    };
    attend(daemon, client, &name, &begun, no_wait)
}

/// What to import of a file.
fn file_import(
    daemon: &Daemon,
    file: Option<PathBuf>,
    format: Option<SourceFormat>,
    store: Option<Name>,
) -> Result<ImageImport, Failure> {
    let (Some(file), Some(format)) = (file, format) else {
        return Err(Failure::usage("give a file and its --format, or --from"));
    };
    let path = daemon.host_path(&file)?.into_os_string().into_string();
    let path = path.map_err(|path| Failure::usage(format!("{path:?}: the path is not UTF-8")))?;
    Ok(ImageImport { path, format, store })
}

/// Signs a version, if there is a key, and copies it to a registry.
fn push(
    daemon: &Daemon,
    client: &Client,
    image: &ImageRef,
    registry: &Name,
    key: Option<&Path>,
    no_wait: bool,
) -> Result<(), Failure> {
    let version = chosen(client, image)?;
    let at = format!("/v1/images/{}/versions/{version}", image.name);
    let manifest = key.map(|_| client.get::<ImageManifest>(&format!("{at}/manifest"))).transpose()?;
    let signature = manifest.zip(key).map(|(manifest, key)| sign(&manifest, key)).transpose()?;
    let push = ImagePush { registry: registry.clone(), signature };
    let begun: Operation = client.post(&format!("{at}/pushes"), &push)?;
    if no_wait {
        return daemon.show(&begun, |begun| format!("operation {}: {}\n", begun.id, begun.what));
    }
    match progress::wait(client, &begun)?.outcome {
        Some(OperationOutcome::Pushed(done)) => {
            let name = format!("{}:{version}", image.name);
            daemon.show(&done, |done| pushed(&name, registry, done))
        }
        _ => Ok(()),
    }
}

/// What a push has sent.
fn pushed(name: &str, registry: &Name, done: &PushOutcome) -> String {
    let was_there = if done.was_there { ", which had it already" } else { "" };
    format!(
        "{name} is in {registry}{was_there}: {} chunks, {} shared with other versions of it, {} found there, {} sent ({})\n",
        done.chunks,
        done.shared_chunks,
        done.found_chunks,
        done.sent_chunks,
        bytes(done.sent_bytes)
    )
}

/// Waits for the version, if requested, and shows its image.
fn attend(
    daemon: &Daemon,
    client: &Client,
    name: &Name,
    begun: &Operation,
    no_wait: bool,
) -> Result<(), Failure> {
    if no_wait {
        return daemon.show(begun, |begun| format!("operation {}: {}\n", begun.id, begun.what));
    }
    progress::wait(client, begun)?;
    show(daemon, client, name)
}

/// Returns the image of a machine's catalog.
fn image_of(client: &Client, machine: &Name) -> Result<Name, Failure> {
    let machine: MachineDetails = client.get(&format!("/v1/machines/{machine}"))?;
    let catalog: Catalog = client.get(&format!("/v1/catalogs/{}", machine.machine.catalog))?;
    Ok(catalog.spec.image.name)
}

fn version(image: &ImageRef) -> Result<u32, Failure> {
    let version = image.version.map(std::num::NonZero::get);
    version.ok_or_else(|| Failure::usage(format!("{image}: which version? Such as {image}:2")))
}

/// Returns the given version, else the published one.
fn chosen(client: &Client, image: &ImageRef) -> Result<u32, Failure> {
    image.version.map_or_else(|| published(client, &image.name), |version| Ok(version.get()))
}

fn published(client: &Client, name: &Name) -> Result<u32, Failure> {
    let details: ImageDetails = client.get(&format!("/v1/images/{name}"))?;
    details.image.published.ok_or_else(|| Failure::usage(format!("no version of {name} is published yet")))
}

/// Summary of a check in one line.
fn verdict(check: &ImageCheck) -> String {
    let said = match check.faults() {
        _ if !check.has_system() => "no system was found that can be looked into".to_owned(),
        0 => "nothing was found that breaks clones".to_owned(),
        1 => "1 thing breaks clones".to_owned(),
        many => format!("{many} things break clones"),
    };
    format!("{}:{}: {said}", check.image, check.version)
}

fn told(check: &ImageCheck) -> String {
    let mut text = format!("{}\n", verdict(check));
    if let Some(guest) = guest_text(check) {
        text += &format!("the guest is {guest}\n");
    }
    for Finding { severity, path, what, why, remedy, .. } in &check.findings {
        let severity = severity.as_str();
        text += &format!("\n{severity}: {path}: {what}\n    why: {why}\n    do:  {remedy}\n");
    }
    text += &format!("\nfirmware finds: {}\n", boot_text(&check.boot));
    let unread = check.volumes.iter().filter_map(|volume| Some((volume, volume.unread.as_ref()?)));
    for (n, (volume, why)) in unread.enumerate() {
        let name = volume.partition.map_or("the disk".into(), |number| format!("partition {number}"));
        let (kind, size) = (volume.content.as_str(), bytes(volume.size_bytes));
        text += &format!(
            "{}{name} ({kind}, {size}) was not looked into: {why}\n",
            if n == 0 { "\n" } else { "" }
        );
    }
    text
}

/// The system of an image, with the version of Windows.
fn guest_text(check: &ImageCheck) -> Option<String> {
    let name = match check.guest? {
        GuestSystem::Linux => return Some("Linux".into()),
        GuestSystem::Windows => "Windows",
    };
    let WindowsVersion { product, edition, build } = check.windows.clone().unwrap_or_default();
    let facts: Vec<String> = edition.into_iter().chain(build.map(|build| format!("build {build}"))).collect();
    let name = product.unwrap_or_else(|| name.into());
    Some(if facts.is_empty() { name } else { format!("{name} ({})", facts.join(", ")) })
}

/// What firmware finds on a disk, in one line.
fn boot_text(boot: &BootFacts) -> String {
    let mut found = vec![
        match boot.partition_table {
            PartitionTable::None => "no partition table",
            PartitionTable::Mbr => "an MBR",
            PartitionTable::Gpt => "a GPT",
        }
        .to_owned(),
    ];
    found.push(if boot.bios_code { "code for a BIOS" } else { "no code for a BIOS" }.into());
    found.extend(boot.efi_partition.map(|number| format!("an EFI system partition ({number})")));
    found.push(match boot.efi_programs.as_slice() {
        [] => "no program for UEFI".into(),
        programs => programs.join(", "),
    });
    found.join(", ")
}

fn show(daemon: &Daemon, client: &Client, name: &Name) -> Result<(), Failure> {
    let details: ImageDetails = client.get(&format!("/v1/images/{name}"))?;
    daemon.show(&details, |details| {
        let rows = details.versions.iter().map(|version| row(&details.image, version));
        let mut text = table(["VERSION", "STATE", "DISK", "STORED", "CREATED", "DIGEST", "FROM"], rows);
        for cached in &details.cached {
            let boot_sets = boot_sets_in_words(cached);
            for line in [cached_in_words(cached)].iter().chain(&boot_sets) {
                text += &format!("version {}: {line}\n", cached.version);
            }
        }
        for version in &details.versions {
            version.notes.iter().for_each(|note| text += &format!("version {}: {note}\n", version.version));
        }
        text
    })
}

/// What is on the host of a version that is streamed.
fn cached_in_words(cached: &CachedVersion) -> String {
    let CachedVersion { residency, chunks, present_chunks, present_bytes, .. } = cached;
    let whole = match (cached.is_whole, cached.unfilled_chunks) {
        (true, _) => "; complete: the registry is not needed any more".into(),
        (false, 0) => String::new(),
        (false, n) => format!("; {n} are being brought"),
    };
    let (residency, size) = (residency.as_str(), bytes(*present_bytes));
    format!("residency {residency}, {present_chunks} of {chunks} chunks are here ({size}){whole}")
}

/// The boot sets of such a version, each in a line.
fn boot_sets_in_words(cached: &CachedVersion) -> Vec<String> {
    if cached.boot_sets.is_empty() {
        return vec!["no boot set: no boot was recorded yet".into()];
    }
    let number = |n: u64, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let line = |set: &CachedBootSet| {
        let from = match set.boots {
            0 => "from the registry".into(),
            n => format!("of {}", number(n, "boot")),
        };
        format!("boot set of {}: {} ({}), {from}", set.catalog, number(set.chunks, "chunk"), bytes(set.bytes))
    };
    cached.boot_sets.iter().map(line).collect()
}

fn row(image: &Image, version: &ImageVersion) -> [String; 7] {
    let number = version.version;
    let mut state = vec![match version.state {
        VersionState::Importing => "importing",
        VersionState::Ready if image.published == Some(number) => "published",
        VersionState::Ready => "ready",
        VersionState::Deleting => "deleting",
    }];
    state.extend(image.tags.iter().filter(|(_, tagged)| **tagged == number).map(|(tag, _)| tag.as_str()));
    let digest = version.digest.as_ref().map_or("-", |digest| &digest[..digest.len().min(19)]);
    let from = match &version.origin {
        Origin::Import { path, .. } => path.clone(),
        Origin::Registry { registry, image } => match version.residency {
            Some(residency) => format!("{registry}/{image}, streamed ({})", residency.as_str()),
            None => format!("{registry}/{image}"),
        },
        Origin::Commit { machine, from } => format!("machine {machine}, over {from}"),
    };
    [
        number.to_string(),
        state.join(" "),
        bytes(version.size_bytes),
        bytes(version.stored_bytes),
        version.created.strftime("%Y-%m-%d %H:%M").to_string(),
        digest.to_owned(),
        from,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_of_an_image_is_told_with_its_version() {
        let mut check = ImageCheck {
            image: "desk".parse().unwrap(),
            version: 1,
            guest: None,
            windows: None,
            volumes: vec![],
            boot: BootFacts::default(),
            findings: vec![],
        };
        assert!(!told(&check).contains("the guest is"));
        check.guest = Some(GuestSystem::Linux);
        assert!(told(&check).contains("\nthe guest is Linux\n"));
        check.guest = Some(GuestSystem::Windows);
        assert!(told(&check).contains("\nthe guest is Windows\n"));
        let [product, edition, build] =
            ["Windows 11 Pro", "Professional", "26100.4061"].map(|text| Some(text.to_owned()));
        check.windows = Some(WindowsVersion { product, edition, build });
        assert!(told(&check).contains("\nthe guest is Windows 11 Pro (Professional, build 26100.4061)\n"));
    }

    #[test]
    fn what_is_here_of_a_streamed_version_and_its_boot_sets_are_told() {
        let set = |catalog: &str, chunks: u64, boots| CachedBootSet {
            catalog: catalog.into(),
            chunks,
            bytes: chunks << 20,
            boots,
        };
        let mut cached = CachedVersion {
            version: 2,
            residency: Residency::Boot,
            chunks: 100,
            present_chunks: 12,
            present_bytes: 10 << 20,
            boot_chunks: 0,
            boot_bytes: 0,
            boot_sets: Vec::new(),
            unfilled_chunks: 3,
            is_whole: false,
        };
        let words = "residency boot, 12 of 100 chunks are here (10.0 MiB); 3 are being brought";
        assert_eq!(cached_in_words(&cached), words);
        assert_eq!(boot_sets_in_words(&cached), ["no boot set: no boot was recorded yet"]);
        cached.boot_sets = vec![set("desk", 40, 3), set("lab", 1, 1), set("other", 7, 0)];
        assert_eq!(
            boot_sets_in_words(&cached),
            [
                "boot set of desk: 40 chunks (40.0 MiB), of 3 boots",
                "boot set of lab: 1 chunk (1.0 MiB), of 1 boot",
                "boot set of other: 7 chunks (7.0 MiB), from the registry",
            ]
        );
        cached.is_whole = true;
        assert!(cached_in_words(&cached).ends_with("; complete: the registry is not needed any more"));
    }
}
