//! `spillway fleet image`. Decides nothing, and shows what the daemon answers.

use super::FLEET;
use crate::error::Failure;
use crate::host::registry::RemoteRef;
use crate::host::{Daemon, table};
use clap::{Args, Subcommand};
use spillway_api::client::Client;
use spillway_api::{Empty, FleetImage, ImageRef, List, NewFleetImage};
use spillway_control::bytes;

const ADD: &str = "\
Push the image to the registry first, on the host that has it ('spillway image push'). A version has the same number in the registry
and on each host. The host that is asked finds out its digest: hosts refuse a registry that has another one later.

A host gets a version when a catalog wants machines of it there: the machines start at once, and chunks come from other hosts and from
the registry as they are read. With --full-copies, so many hosts have all of the image whether or not they have machines of it, so that
machines start although the registry is away. The hosts follow from the image and from the list of hosts. If one is lost, another one makes the
copy.

The command again, with another number of copies, changes it.

Examples:
  spillway fleet image add debian --from hub/debian
  spillway fleet image add desktop:7 --from hub/desktop-golden:7 --full-copies 3";

const LIST: &str = "\
WHOLE counts the hosts that have all of a version, of those that are to have it. PARTS counts hosts that have a part. Hosts report at most
every ten seconds, and only versions that a catalog uses or that have --full-copies.

Examples:
  spillway fleet image list
  spillway fleet image list --json | jq -r '.items[] | select((.whole | length) < .full_copies).image'";

const REMOVE: &str = "\
It is refused while a catalog of the fleet uses the version. Hosts that have it keep it ('spillway image delete' on each).

Example:
  spillway fleet image remove debian:6";

/// What to do with images of the fleet.
#[derive(Debug, Subcommand)]
pub enum FleetImageCommand {
    /// Add a version of an image from a registry of the fleet, or change its number of full copies
    #[command(after_help = ADD)]
    Add(Add),
    /// List images of the fleet, and how many hosts have them
    #[command(after_help = LIST)]
    List,
    /// Remove a version of an image from the fleet
    #[command(after_help = REMOVE)]
    Remove {
        /// The version, such as debian:6
        #[arg(value_name = "IMAGE:VERSION")]
        image: ImageRef,
    },
}

/// An image to be added.
#[derive(Debug, Args)]
pub struct Add {
    /// Name of the image for catalogs of the fleet
    #[arg(value_name = "IMAGE[:VERSION]")]
    image: ImageRef,
    /// Image in a registry of the fleet [default version: the highest]
    #[arg(long, value_name = "REGISTRY/IMAGE[:VERSION]")]
    from: RemoteRef,
    /// Number of hosts that have all of the image
    #[arg(long, value_name = "N", default_value_t = 0)]
    full_copies: u32,
}

/// Does it.
pub fn image(daemon: &Daemon, client: &Client, command: FleetImageCommand) -> Result<(), Failure> {
    let path = format!("{FLEET}/images");
    match command {
        FleetImageCommand::Add(add) => {
            let added: FleetImage = client.post(&path, &add.body())?;
            daemon.show(&added, |added| list(std::slice::from_ref(added)))
        }
        FleetImageCommand::List => {
            let all: List<FleetImage> = client.get(&path)?;
            daemon.show(&all, |all| list(&all.items))
        }
        FleetImageCommand::Remove { image } => {
            let version = image
                .version
                .ok_or_else(|| Failure::usage(format!("{image}: which version? Such as {image}:2")))?;
            let removed: Empty = client.delete(&format!("{path}/{}/{version}", image.name))?;
            daemon.show(&removed, |_| {
                format!("{image} is removed from the fleet; hosts that have it keep it\n")
            })
        }
    }
}

impl Add {
    fn body(self) -> NewFleetImage {
        let RemoteRef { registry, image: source } = self.from;
        NewFleetImage { image: self.image, registry, source, full_copies: self.full_copies }
    }
}

fn list(images: &[FleetImage]) -> String {
    let rows = images.iter().map(|image| {
        let whole = image.whole.len();
        let parts = image.parts.keys().filter(|host| !image.whole.contains(host)).count();
        let catalogs: Vec<_> = image.catalogs.iter().map(ToString::to_string).collect();
        [
            format!("{}:{}", image.image, image.version),
            bytes(image.size_bytes),
            format!("{}/{}:{}", image.registry, image.source, image.version),
            if image.full_copies == 0 { whole.to_string() } else { format!("{whole}/{}", image.full_copies) },
            parts.to_string(),
            if catalogs.is_empty() { "-".into() } else { catalogs.join(", ") },
        ]
    });
    table(["IMAGE", "SIZE", "FROM", "WHOLE", "PARTS", "CATALOGS"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_list_says_how_many_hosts_have_all_of_it() {
        let image = |copies: u32| -> FleetImage {
            serde_json::from_value(json!({
                "image": "desktop", "version": 7, "digest": "sha256:0", "size_bytes": 1 << 30, "registry": "hub",
                "source": "golden", "full_copies": copies, "whole": ["a"], "parts": { "a": 1000, "b": 50 },
                "catalogs": ["desk", "lab"],
            }))
            .unwrap()
        };
        let text = list(&[image(3), FleetImage { catalogs: vec![], ..image(0) }]);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows[1][..],
            ["desktop:7", "1.0", "GiB", "hub/golden:7", "1/3", "1", "desk,", "lab"],
            "{text}"
        );
        assert_eq!(rows[2][4..], ["1", "1", "-"], "{text}");
    }

    #[test]
    fn an_image_may_have_another_name_in_the_registry() {
        let add =
            Add { image: "desktop".parse().unwrap(), from: "hub/golden:7".parse().unwrap(), full_copies: 3 };
        let body = serde_json::to_value(add.body()).unwrap();
        assert_eq!(
            body,
            json!({ "image": "desktop", "registry": "hub", "source": "golden:7", "full_copies": 3 })
        );
    }
}
