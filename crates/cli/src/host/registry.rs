//! `spillway registry`.

use super::{Daemon, progress, table};
use crate::error::Failure;
use clap::{Args, Subcommand};
use spillway_api::{
    CollectionOutcome, Empty, ImageRef, List, Name, Operation, OperationOutcome, Registry, RegistryCheck,
    RegistryCollection,
};
use spillway_control::bytes;
use std::path::{Path, PathBuf};
use std::str::FromStr;

const ADD_EXAMPLES: &str = "\
The file of --credentials is one of AWS's tools. Only root needs to read it (chmod 0600):
  [default]
  aws_access_key_id = ...
  aws_secret_access_key = ...

http:// is without TLS: everybody on the way can read the images. The secret key is never sent. A session token
(aws_session_token) is sent with each request: do not use one over http://.

A registry that was added cannot be changed: remove it, and add it again.

Examples:
  spillway registry add hub s3://images/golden --endpoint https://s3.example.org --credentials /etc/spillway/hub
  spillway registry add mirror https://images.example.org/golden --require-signature /etc/spillway/images.pub
  spillway registry add share file:///srv/images";

const DELETE_EXAMPLES: &str = "\
The registry does not know which hosts stream a version. Before you delete one, look at each host with 'spillway image
show NAME': a version that is streamed and not complete there still needs the registry. After 'registry gc --delete',
reads of its missing chunks end with I/O errors.

Example:
  spillway registry delete hub/debian:1";

const GC_EXAMPLES: &str = "\
Without --delete nothing is changed. With it, garbage is recorded, and what a collection recorded at least --gap ago is
deleted if it is garbage still: a push that is in progress keeps what it needs.

A version that was deleted from the registry keeps no chunks there, also if hosts still stream it.

Examples:
  spillway registry gc hub
  spillway registry gc hub --delete";

/// What to do with registries.
#[derive(Debug, Subcommand)]
pub enum RegistryCommand {
    /// Add a registry: a bucket, a folder or a web server with images for many hosts
    #[command(after_help = ADD_EXAMPLES)]
    Add(Add),
    /// List registries
    List,
    /// Try the address and credentials of a registry, and list the images in it
    Check {
        /// The registry
        name: Name,
    },
    /// Delete a version of an image from a registry; 'gc' removes what nothing else needs
    #[command(after_help = DELETE_EXAMPLES)]
    Delete {
        /// The version in the registry, such as hub/debian:3
        image: RemoteRef,
    },
    /// Collect garbage: what no version in the registry needs
    #[command(after_help = GC_EXAMPLES)]
    Gc {
        /// The registry
        name: Name,
        /// Record garbage, and delete what was recorded before
        #[arg(long)]
        delete: bool,
        /// Age from which an object can be garbage
        #[arg(long, value_name = "TIME", value_parser = spillway_api::parse_seconds, default_value = "7d")]
        grace: u32,
        /// Least time between recording and deletion
        #[arg(long, value_name = "TIME", value_parser = spillway_api::parse_seconds, default_value = "1d")]
        gap: u32,
    },
    /// Forget a registry; what is in it stays
    Remove {
        /// The registry
        name: Name,
    },
}

/// A registry to be added.
#[derive(Debug, Args)]
pub struct Add {
    /// Name of the registry
    name: Name,
    /// Address: s3://BUCKET/PREFIX, file:///FOLDER, or https://HOST/PATH or http://HOST/PATH (only for reading)
    url: String,
    /// With s3: address of the S3 service, https://HOST or http://HOST, each also with :PORT [default: AWS]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// With s3: region of the bucket [default: us-east-1]
    #[arg(long)]
    region: Option<String>,
    /// With s3: file with the credentials, on spillwayd's host [default: requests are not signed]
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Take images only if this key of minisign has signed them: the key, or its file. May be repeated: any one of the keys is enough
    #[arg(long, value_name = "KEY")]
    require_signature: Vec<String>,
    /// Nobody else pushes to the registry: for S3 services without conditional writes
    #[arg(long)]
    single_writer: bool,
}

/// Reference to an image in a registry: `hub/debian`, `hub/debian:3`.
#[derive(Clone, Debug)]
pub struct RemoteRef {
    /// The registry.
    pub registry: Name,
    /// The image in it.
    pub image: ImageRef,
}

impl FromStr for RemoteRef {
    type Err = String;

    fn from_str(text: &str) -> Result<RemoteRef, String> {
        let (registry, image) =
            text.split_once('/').ok_or("give the registry and the image, such as hub/debian:3")?;
        Ok(RemoteRef { registry: registry.parse().map_err(|e| format!("{e}"))?, image: image.parse()? })
    }
}

/// Does it.
pub fn registry(daemon: &Daemon, command: RegistryCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        RegistryCommand::Add(add) => {
            let added: Registry = client.post("/v1/registries", &add.registry(daemon)?)?;
            show(daemon, &List { items: vec![added] })
        }
        RegistryCommand::List => show(daemon, &client.list("/v1/registries")?),
        RegistryCommand::Check { name } => {
            let check: RegistryCheck = client.post(&format!("/v1/registries/{name}/check"), &Empty {})?;
            daemon.show(&check, told)
        }
        RegistryCommand::Delete { image: RemoteRef { registry, image } } => {
            let version = image.version.ok_or_else(|| {
                Failure::usage(format!("{registry}/{image}: which version? Such as {registry}/{image}:2"))
            })?;
            let deleted: Empty =
                client.delete(&format!("/v1/registries/{registry}/images/{}/{version}", image.name))?;
            daemon.show(&deleted, |_| format!("{registry}/{image} is deleted\n"))
        }
        RegistryCommand::Gc { name, delete, grace, gap } => {
            let order = RegistryCollection { delete, grace_seconds: Some(grace), gap_seconds: Some(gap) };
            let begun: Operation = client.post(&format!("/v1/registries/{name}/collections"), &order)?;
            match progress::wait(&client, &begun)?.outcome {
                Some(OperationOutcome::Collected(found)) => {
                    daemon.show(&found, |found| collected(&name, found, delete))
                }
                _ => Ok(()),
            }
        }
        RegistryCommand::Remove { name } => {
            let removed: Empty = client.delete(&format!("/v1/registries/{name}"))?;
            daemon.show(&removed, |_| format!("{name} is removed; what is in it stays\n"))
        }
    }
}

impl Add {
    /// The registry, with paths of the daemon's host.
    pub fn registry(self, daemon: &Daemon) -> Result<Registry, Failure> {
        let keys = self.require_signature.iter().map(|key| match Path::new(key).is_file() {
            true => std::fs::read_to_string(key).map_err(|e| Failure::usage(format!("{key}: {e}"))),
            false => Ok(key.clone()),
        });
        Ok(Registry {
            name: self.name,
            url: self.url,
            endpoint: self.endpoint,
            region: self.region,
            credentials: self.credentials.map(|path| daemon.host_path(&path)).transpose()?,
            require_signature: keys.collect::<Result<_, _>>()?,
            single_writer: self.single_writer,
        })
    }
}

/// Shows registries as a table.
pub fn show(daemon: &Daemon, registries: &List<Registry>) -> Result<(), Failure> {
    daemon.show(registries, |registries| {
        let rows = registries.items.iter().map(|registry| {
            let required = match registry.require_signature.len() {
                0 => "none".to_owned(),
                1 => "1".to_owned(),
                keys => format!("one of {keys}"),
            };
            let credentials = registry.credentials.as_ref();
            let credentials = credentials.map_or("-".into(), |path| path.display().to_string());
            [registry.name.to_string(), registry.url.clone(), required, credentials]
        });
        table(["NAME", "ADDRESS", "REQUIRED KEYS", "CREDENTIALS"], rows)
    })
}

fn told(check: &RegistryCheck) -> String {
    let yes = |is: bool| if is { "yes" } else { "no" };
    let state = match check.is_registry {
        true => "a registry",
        false => {
            "no registry: mount its folder, or correct the address with 'registry remove' and 'registry add'"
        }
    };
    let mut text = format!(
        "{}: {state}\nlist: {}, write: {}, conditional writes: {}\n",
        check.registry,
        yes(check.can_list),
        yes(check.can_write),
        yes(check.can_create)
    );
    if !check.images.is_empty() {
        text += "\n";
        let row = |image: &ImageRef| {
            [image.name.to_string(), image.version.map_or("-".into(), |version| version.to_string())]
        };
        text += &table(["IMAGE", "VERSION"], check.images.iter().map(row));
    }
    text
}

fn collected(name: &Name, found: &CollectionOutcome, delete: bool) -> String {
    let mut text = format!(
        "{name}: {} versions, {} chunks ({}), {} pushes in progress or interrupted\n",
        found.versions,
        found.chunks,
        bytes(found.chunk_bytes),
        found.pushes
    );
    text += &format!(
        "garbage: {} chunks ({}), {} images, {} interrupted pushes\n",
        found.garbage_chunks,
        bytes(found.garbage_bytes),
        found.garbage_images,
        found.dead_pushes
    );
    let garbage = found.garbage_chunks + found.garbage_images + found.dead_pushes;
    text += &match (delete, found.deletable) {
        (_, 0) if garbage == 0 => String::new(),
        (true, 0) => {
            "nothing was deleted: the garbage is recorded, and can be deleted after the gap\n".to_owned()
        }
        (true, objects) => format!("{objects} objects were deleted\n"),
        (false, objects) => format!("{objects} objects could be deleted now; with --delete they are\n"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_of_a_registry_is_named_with_it() {
        let named: RemoteRef = "hub/debian:3".parse().unwrap();
        assert_eq!((named.registry.as_str(), named.image.to_string().as_str()), ("hub", "debian:3"));
        for text in ["debian", "/debian", "hub/", "hub/a/b", "hub/debian:0"] {
            assert!(text.parse::<RemoteRef>().is_err(), "{text}");
        }
    }
}
