//! Keys of a fleet's records. Owns their layout below `/spillway/FLEET/`.
//!
//! Invariant: parts of keys are [`Name`]s, numbers and digests, so that none contains a slash.

use spillway_api::Name;
use std::fmt;
use std::str::FromStr;

/// Hexadecimal digits of a SHA-256.
const DIGEST_DIGITS: usize = 64;

/// SHA-256 of an image in a key: 64 hexadecimal digits in small letters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageDigest(String);

impl ImageDigest {
    /// The digest that records write as `sha256:` and its digits; `None` if it is none.
    pub fn of(text: &str) -> Option<ImageDigest> {
        text.strip_prefix("sha256:")?.parse().ok()
    }

    /// The digest as records write it.
    pub fn with_kind(&self) -> String {
        format!("sha256:{}", self.0)
    }
}

impl fmt::Display for ImageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ImageDigest {
    type Err = UnknownKey;

    fn from_str(text: &str) -> Result<ImageDigest, UnknownKey> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match text.len() == DIGEST_DIGITS && text.bytes().all(is_digit) {
            true => Ok(ImageDigest(text.to_owned())),
            false => Err(UnknownKey),
        }
    }
}

/// Key of a record, without the prefix of its fleet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// `meta`: what all hosts must understand.
    Meta,
    /// `hosts/HOST`: what is desired of a host.
    Host(Name),
    /// `alive/HOST`: there as long as the host renews its lease.
    Alive(Name),
    /// `status/HOST`: what a host has, and what its machines do.
    Status(Name),
    /// `catalogs/CATALOG`: settings and version of a catalog.
    Catalog(Name),
    /// `share/HOST/CATALOG`: how many machines of a catalog a host is to have.
    Share(Name, Name),
    /// `rollouts/CATALOG`: how far another version of a catalog is.
    Rollout(Name),
    /// `named/CATALOG/MACHINE`: where a machine with a name of the fleet is.
    Named(Name, Name),
    /// `place/HOST/CATALOG/MACHINE`: a machine with a name of the fleet that a host is to have.
    Place(Name, Name, Name),
    /// `images/IMAGE/VERSION`: where hosts have a version from.
    Image(Name, u32),
    /// `registries/REGISTRY`: a registry of images.
    Registry(Name),
    /// `boot/DIGEST/CATALOG`: chunks of an image that machines of a catalog read first.
    Boot(ImageDigest, Name),
    /// `leader/placer`: who places, as long as its lease lasts.
    Placer,
}

impl Key {
    /// Prefix of all keys of a fleet, with a slash at the end.
    pub fn prefix(fleet: &Name) -> String {
        format!("/spillway/{fleet}/")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Meta => f.write_str("meta"),
            Key::Host(host) => write!(f, "hosts/{host}"),
            Key::Alive(host) => write!(f, "alive/{host}"),
            Key::Status(host) => write!(f, "status/{host}"),
            Key::Catalog(catalog) => write!(f, "catalogs/{catalog}"),
            Key::Share(host, catalog) => write!(f, "share/{host}/{catalog}"),
            Key::Rollout(catalog) => write!(f, "rollouts/{catalog}"),
            Key::Named(catalog, machine) => write!(f, "named/{catalog}/{machine}"),
            Key::Place(host, catalog, machine) => write!(f, "place/{host}/{catalog}/{machine}"),
            Key::Image(image, version) => write!(f, "images/{image}/{version}"),
            Key::Registry(registry) => write!(f, "registries/{registry}"),
            Key::Boot(digest, catalog) => write!(f, "boot/{digest}/{catalog}"),
            Key::Placer => f.write_str("leader/placer"),
        }
    }
}

/// A key that is of no kind that is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKey;

impl FromStr for Key {
    type Err = UnknownKey;

    fn from_str(text: &str) -> Result<Key, UnknownKey> {
        let parts: Vec<&str> = text.split('/').collect();
        let name = |text: &str| text.parse::<Name>().map_err(|_| UnknownKey);
        match parts[..] {
            ["meta"] => Ok(Key::Meta),
            ["hosts", host] => Ok(Key::Host(name(host)?)),
            ["alive", host] => Ok(Key::Alive(name(host)?)),
            ["status", host] => Ok(Key::Status(name(host)?)),
            ["catalogs", catalog] => Ok(Key::Catalog(name(catalog)?)),
            ["share", host, catalog] => Ok(Key::Share(name(host)?, name(catalog)?)),
            ["rollouts", catalog] => Ok(Key::Rollout(name(catalog)?)),
            ["named", catalog, machine] => Ok(Key::Named(name(catalog)?, name(machine)?)),
            ["place", host, catalog, machine] => Ok(Key::Place(name(host)?, name(catalog)?, name(machine)?)),
            ["images", image, version] => {
                let is_plain = version.bytes().all(|b| b.is_ascii_digit()) && !version.starts_with('0');
                let version = version.parse().ok().filter(|_| is_plain).ok_or(UnknownKey)?;
                Ok(Key::Image(name(image)?, version))
            }
            ["registries", registry] => Ok(Key::Registry(name(registry)?)),
            ["boot", digest, catalog] => Ok(Key::Boot(digest.parse()?, name(catalog)?)),
            ["leader", "placer"] => Ok(Key::Placer),
            _ => Err(UnknownKey),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_form() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        let (digest, upper) = ("5a".repeat(32), format!("boot/{}/desk", "5A".repeat(32)));
        let boot = format!("boot/{digest}/desk");
        for (key, text) in [
            (Key::Meta, "meta"),
            (Key::Host(name("a")), "hosts/a"),
            (Key::Alive(name("a")), "alive/a"),
            (Key::Status(name("a")), "status/a"),
            (Key::Catalog(name("desk")), "catalogs/desk"),
            (Key::Share(name("a"), name("desk")), "share/a/desk"),
            (Key::Rollout(name("desk")), "rollouts/desk"),
            (Key::Named(name("desk"), name("desk-001")), "named/desk/desk-001"),
            (Key::Place(name("a"), name("desk"), name("desk-001")), "place/a/desk/desk-001"),
            (Key::Image(name("debian"), 12), "images/debian/12"),
            (Key::Registry(name("s3")), "registries/s3"),
            (Key::Boot(digest.parse().unwrap(), name("desk")), &boot),
            (Key::Placer, "leader/placer"),
        ] {
            assert_eq!((key.to_string().as_str(), text.parse()), (text, Ok(key)));
        }
        for text in [
            "",
            "hosts",
            "hosts/",
            "hosts/A",
            "hosts/a/b",
            "share/a",
            "named/desk",
            "place/a/desk",
            "images/x/0",
            "images/x/+1",
            "images/x/01",
            "leader/x",
            "boot/5a/desk",
            &upper,
            "/meta",
        ] {
            assert_eq!(text.parse::<Key>(), Err(UnknownKey), "{text}");
        }
        assert_eq!(
            ImageDigest::of(&format!("sha256:{digest}")).unwrap().with_kind(),
            format!("sha256:{digest}")
        );
        assert_eq!((ImageDigest::of(&digest), ImageDigest::of("sha256:5a")), (None, None));
        assert_eq!(Key::prefix(&name("site")), "/spillway/site/");
    }
}
