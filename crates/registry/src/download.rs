//! Addresses of images outside registries, and the rules about which of them may be used. Owns both grammars, and the classes of
//! IP addresses; looks up no name and connects to nothing.
//!
//! Invariant: what no rule names is not allowed, and no text of an address is quoted before it is known to have no password.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::str::FromStr;

const MOST_URL_BYTES: usize = 2048;
const MOST_REPOSITORY_BYTES: usize = 255;
const MOST_TAG_BYTES: usize = 128;
const FORMS: &str = "give https://HOST/PATH, http://HOST/PATH or oci://REGISTRY/REPOSITORY[:TAG]";

/// What a job downloads, and to where.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DownloadOrder {
    /// Address of the image.
    pub url: ImageUrl,
    /// An existing file, empty, which the job may write.
    pub to: PathBuf,
    /// Digest that the file at the address must have: 64 hexadecimal digits.
    pub sha256: Option<String>,
    /// Rules about what the job may connect to.
    pub rules: Vec<SourceRule>,
    /// Largest file that is written, and largest answer that is received, in bytes.
    pub most_bytes: u64,
}

/// How the file at an address is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UrlKind {
    /// A file of a web server, over TLS.
    Https,
    /// A file of a web server, without TLS.
    Http,
    /// A disk in an image, or an artifact, of an OCI registry.
    Oci,
}

/// Address of an image: of a web server, or of an OCI registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageUrl {
    text: String,
    kind: UrlKind,
    host: String,
    port: Option<u16>,
    path: String,
}

impl ImageUrl {
    /// How the file is found.
    pub fn kind(&self) -> UrlKind {
        self.kind
    }

    /// The whole address. What follows a `?` may be a secret.
    pub fn secret_text(&self) -> &str {
        &self.text
    }

    /// Host, in lower case; an IPv6 address is in brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port, if the address has one.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// The repository, and the tag or the digest in it, of an address of an OCI registry.
    pub fn reference(&self) -> Result<OciReference, String> {
        self.path.parse()
    }
}

/// The address for people: without what follows a `?`.
impl fmt::Display for ImageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.split('?').next().unwrap_or_default())
    }
}

impl FromStr for ImageUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<ImageUrl, String> {
        let (scheme, rest) = text.split_once("://").ok_or(FORMS)?;
        let kind = match scheme {
            "https" => UrlKind::Https,
            "http" => UrlKind::Http,
            "oci" => UrlKind::Oci,
            _ => return Err(FORMS.into()),
        };
        let is_plain = |c: char| c.is_ascii_graphic() && !"#\\\"<>".contains(c);
        if text.len() > MOST_URL_BYTES || !text.chars().all(is_plain) {
            return Err(format!(
                "an address has at most {MOST_URL_BYTES} bytes, and no spaces, '#', '\\', quotes or letters outside ASCII"
            ));
        }
        let (authority, path) = rest.split_once('/').ok_or(FORMS)?;
        if authority.contains('@') {
            return Err("an address has no user and password: they would be recorded and shown".into());
        }
        let (host, port) = parse_host(authority)?;
        let url = ImageUrl { text: text.to_owned(), kind, host, port, path: path.to_owned() };
        match kind {
            UrlKind::Oci => drop(url.reference()?),
            _ if path.is_empty() || path.starts_with('?') => return Err(FORMS.into()),
            _ => {}
        }
        Ok(url)
    }
}

impl TryFrom<String> for ImageUrl {
    type Error = String;

    fn try_from(text: String) -> Result<ImageUrl, String> {
        text.parse()
    }
}

impl From<ImageUrl> for String {
    fn from(url: ImageUrl) -> String {
        url.text
    }
}

/// Parses `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`.
fn parse_host(text: &str) -> Result<(String, Option<u16>), String> {
    let (host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((address, port))) => {
            let address: Ipv6Addr = address.parse().map_err(|_| "what is in brackets is no IPv6 address")?;
            (format!("[{address}]"), port.strip_prefix(':').or((!port.is_empty()).then_some("")))
        }
        Some(None) => return Err("a bracket is not closed".into()),
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
            if host.is_empty() || host.len() > 253 || !host.bytes().all(is_name) {
                return Err("it names no host".into());
            }
            (host.to_ascii_lowercase(), port)
        }
    };
    let port = port.map(|port| {
        let number =
            port.parse().ok().filter(|number| *number > 0 && port.bytes().all(|b| b.is_ascii_digit()));
        number.ok_or_else(|| "a port is a number from 1 to 65535".to_owned())
    });
    Ok((host, port.transpose()?))
}

/// An image in an OCI registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciReference {
    /// Repository, such as `containerdisks/debian`.
    pub repository: String,
    /// Tag; `latest` if the address names none.
    pub tag: String,
    /// Digest of the manifest, `sha256:` and 64 hexadecimal digits, which is used instead of the tag.
    pub digest: Option<String>,
}

impl FromStr for OciReference {
    type Err = String;

    /// Parses what follows `oci://REGISTRY/`.
    fn from_str(text: &str) -> Result<OciReference, String> {
        let (named, digest) =
            text.split_once('@').map_or((text, None), |(named, digest)| (named, Some(digest)));
        let (repository, tag) = named.split_once(':').unwrap_or((named, "latest"));
        let is_word = |word: &str| {
            let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
            let is_outer = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
            let bytes = word.as_bytes();
            is_outer(bytes.first()) && is_outer(bytes.last()) && bytes.iter().all(|b| is_inner(*b))
        };
        if repository.len() > MOST_REPOSITORY_BYTES || !repository.split('/').all(is_word) {
            return Err(
                "a repository is words of lower case letters and digits, such as containerdisks/debian"
                    .into(),
            );
        }
        let is_of_tag = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if tag.is_empty()
            || tag.len() > MOST_TAG_BYTES
            || tag.starts_with(['.', '-'])
            || !tag.bytes().all(is_of_tag)
        {
            return Err("a tag is letters, digits, '.', '_' and '-', such as 12.5".into());
        }
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err("a digest is sha256: and 64 hexadecimal digits in lower case".into());
        }
        Ok(OciReference { repository: repository.into(), tag: tag.into(), digest: digest.map(str::to_owned) })
    }
}

/// Whether this is a digest: `sha256:` and 64 hexadecimal digits in lower case.
pub fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(is_sha256)
}

/// Whether these are 64 hexadecimal digits in lower case.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// A rule of the administrator: a host that images may be downloaded from. Its forms are `[http://]HOST[:PORT][,local]`, and `*`
/// for any host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SourceRule {
    /// Whether the host is asked without TLS.
    is_plain: bool,
    /// None: any host with a public address.
    host: Option<String>,
    /// None: the usual port of the protocol; with `*` any port.
    port: Option<u16>,
    /// Whether the host may be this one, or have another address of the class [`AddressClass::Local`].
    is_local: bool,
}

impl FromStr for SourceRule {
    type Err = String;

    fn from_str(text: &str) -> Result<SourceRule, String> {
        const RULES: &str = "give HOST, HOST:PORT, http://HOST[:PORT] for one without TLS, or * for any host with a public address; \
                             add ',local' for a host with a loopback or link-local address";
        if text == "*" {
            return Ok(SourceRule { is_plain: false, host: None, port: None, is_local: false });
        }
        let (rest, is_local) = text.strip_suffix(",local").map_or((text, false), |rest| (rest, true));
        let (authority, is_plain) = match rest.split_once("://") {
            Some(("http", authority)) => (authority, true),
            Some(("https", authority)) => (authority, false),
            Some(_) => return Err(RULES.into()),
            None => (rest, false),
        };
        let (host, port) = parse_host(authority).map_err(|why| format!("{why}: {RULES}"))?;
        Ok(SourceRule { is_plain, host: Some(host), port, is_local })
    }
}

impl TryFrom<String> for SourceRule {
    type Error = String;

    fn try_from(text: String) -> Result<SourceRule, String> {
        text.parse()
    }
}

impl From<SourceRule> for String {
    fn from(rule: SourceRule) -> String {
        rule.to_string()
    }
}

impl fmt::Display for SourceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(host) = &self.host else { return f.write_str("*") };
        f.write_str(if self.is_plain { "http://" } else { "" })?;
        f.write_str(host)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))?;
        f.write_str(if self.is_local { ",local" } else { "" })
    }
}

/// Port of the protocol, if an address names none.
pub fn usual_port(is_plain: bool) -> u16 {
    if is_plain { 80 } else { 443 }
}

/// Which addresses of an allowed host may be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Public ones: the host is allowed by `*` only.
    Public,
    /// Those of private networks too: a rule names the host.
    Private,
    /// Also those that are usually this host's own.
    Local,
}

/// Returns which addresses of a host may be connected to; none if no rule allows the host.
pub fn reach(rules: &[SourceRule], is_plain: bool, host: &str, port: u16) -> Option<Reach> {
    let of_rule = |rule: &SourceRule| match &rule.host {
        None => (!is_plain).then_some(Reach::Public),
        Some(named) => {
            let is_it = named == host
                && rule.is_plain == is_plain
                && rule.port.unwrap_or_else(|| usual_port(is_plain)) == port;
            is_it.then_some(if rule.is_local { Reach::Local } else { Reach::Private })
        }
    };
    rules.iter().filter_map(of_rule).max()
}

/// Whether an OCI registry is asked without TLS: if a rule says so for this host, and none names it with TLS.
pub fn is_plain_registry(rules: &[SourceRule], host: &str, port: Option<u16>) -> bool {
    let reach = |is_plain| reach(rules, is_plain, host, port.unwrap_or_else(|| usual_port(is_plain)));
    reach(false).is_none_or(|reach| reach == Reach::Public) && reach(true).is_some()
}

/// The rule that would allow a host.
pub fn rule_for(is_plain: bool, host: &str, port: u16, is_local: bool) -> String {
    let port = Some(port).filter(|port| *port != usual_port(is_plain));
    SourceRule { is_plain, host: Some(host.to_owned()), port, is_local }.to_string()
}

/// Class of an IP address, which decides who may have it connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressClass {
    /// An address of the internet.
    Public,
    /// An address of a private network, or one that is reserved.
    Private,
    /// Loopback, link-local, or the service at which a cloud keeps secrets of its machines.
    Local,
    /// No address of one host: unspecified, multicast, broadcast.
    Never,
}

/// Addresses at which clouds give a machine its metadata and credentials, beside 169.254.169.254, which is link-local.
const METADATA: [IpAddr; 5] = [
    // Alibaba, Azure, Oracle, AWS, Google.
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
];

impl AddressClass {
    /// Returns the class of an address.
    pub fn of(address: IpAddr) -> AddressClass {
        if METADATA.contains(&address) {
            return AddressClass::Local;
        }
        match address {
            IpAddr::V4(address) => AddressClass::of_v4(address),
            IpAddr::V6(address) => AddressClass::of_v6(address),
        }
    }

    /// Classes of the registry of special-purpose addresses (RFC 6890).
    fn of_v4(address: Ipv4Addr) -> AddressClass {
        let is_private = |[a, b, c, _]: [u8; 4]| match (a, b, c) {
            (10, ..) | (192, 168, _) | (192, 0, 0) => true,
            (172, b, _) => (16..32).contains(&b),
            // Behind a carrier's address translation.
            (100, b, _) => (64..128).contains(&b),
            // Benchmarks and documentation.
            (198, 18 | 19, _) | (192, 0, 2) | (198, 51, 100) | (203, 0, 113) => true,
            _ => false,
        };
        match address.octets() {
            [0 | 224..=255, ..] => AddressClass::Never,
            [127, ..] | [169, 254, ..] => AddressClass::Local,
            octets if is_private(octets) => AddressClass::Private,
            _ => AddressClass::Public,
        }
    }

    fn of_v6(address: Ipv6Addr) -> AddressClass {
        let segments = address.segments();
        let embedded = || {
            let [.., high, low] = segments;
            AddressClass::of(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)).into())
        };
        match segments {
            [0, 0, 0, 0, 0, 0, 0, 1] => AddressClass::Local,
            // IPv4 addresses in IPv6: compatible (with the unspecified address), mapped, translated.
            [0, 0, 0, 0, 0, 0 | 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => embedded(),
            [0xfe80..=0xfebf, ..] => AddressClass::Local,
            [0xff00..=0xffff, ..] => AddressClass::Never,
            // Documentation, and tunnels whose other end is in the address.
            [0x2001, 0 | 0xdb8, ..] | [0x2002, ..] => AddressClass::Private,
            [0x2000..=0x3fff, ..] => AddressClass::Public,
            _ => AddressClass::Private,
        }
    }
}

impl Reach {
    /// Whether an address may be connected to.
    pub fn includes(self, address: IpAddr) -> bool {
        match AddressClass::of(address) {
            AddressClass::Public => true,
            AddressClass::Private => self >= Reach::Private,
            AddressClass::Local => self == Reach::Local,
            AddressClass::Never => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_a_path_and_no_password() {
        let url: ImageUrl = "https://Example.org:8443/a/b.qcow2?token=secret".parse().unwrap();
        assert_eq!((url.kind(), url.host(), url.port()), (UrlKind::Https, "example.org", Some(8443)));
        assert_eq!(url.to_string(), "https://Example.org:8443/a/b.qcow2");
        let v6: ImageUrl = "http://[::0001]/x".parse().unwrap();
        assert_eq!((v6.host(), v6.port()), ("[::1]", None));
        for text in [
            "",
            "/srv/x",
            "ftp://host/x",
            "file:///x",
            "https://host",
            "https://host/",
            "https://host/?x",
            "https:///x",
            "https://host:/x",
            "https://host:0/x",
            "https://host:+1/x",
            "https://host:65536/x",
            "https://[::1/x",
            "https://[::1]x/x",
            "https://[1.2.3.4]/x",
            "https://ho st/x",
            "https://host/x#y",
            "https://host\\@other/x",
            "https://h%6fst/x",
            "https://höst/x",
            "https://user:secret@host/x",
            "https://secret@host/x",
            "oci://user:secret@host/x",
            "oci://host/",
            "oci://host/X",
            "oci://host/a//b",
            "oci://host/../a",
            "oci://host/a:",
            "oci://host/a:-b",
            "oci://host/a@sha256:12",
            "oci://host/a@md5:12",
        ] {
            let why = text.parse::<ImageUrl>().unwrap_err();
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn a_reference_names_a_tag_or_a_digest() {
        let of = |text: &str| text.parse::<ImageUrl>().unwrap().reference().unwrap();
        let plain = of("oci://quay.io/containerdisks/debian");
        let expected =
            OciReference { repository: "containerdisks/debian".into(), tag: "latest".into(), digest: None };
        assert_eq!(plain, expected);
        assert_eq!(of("oci://127.0.0.1:5000/a:12.5_x").tag, "12.5_x");
        let digest = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(of(&format!("oci://host/a/b:c@{digest}")).digest, Some(digest));
    }

    #[test]
    fn rules_allow_what_they_name_and_nothing_else() {
        let rules =
            |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<SourceRule>>();
        for text in ["*", "host", "host:8443", "http://host", "http://[::1]:81,local", "10.0.0.1,local"] {
            assert_eq!(text.parse::<SourceRule>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "*:443",
            "*,local",
            "*.example.org",
            "ftp://host",
            "host/",
            "user@host",
            "host,remote",
            "host:x",
        ] {
            assert!(text.parse::<SourceRule>().is_err(), "{text}");
        }
        assert_eq!(reach(&[], false, "host", 443), None);
        let some = rules(&["Host", "http://plain:8080", "http://127.0.0.1:5000,local"]);
        assert_eq!(reach(&some, false, "host", 443), Some(Reach::Private));
        assert_eq!(reach(&some, false, "host", 8443), None);
        assert_eq!(reach(&some, true, "host", 80), None);
        assert_eq!(reach(&some, true, "plain", 8080), Some(Reach::Private));
        assert_eq!(reach(&some, false, "plain", 8080), None);
        assert_eq!(reach(&some, true, "127.0.0.1", 5000), Some(Reach::Local));
        let any = rules(&["*", "host,local", "http://plain"]);
        assert_eq!(reach(&any, false, "other", 8443), Some(Reach::Public));
        assert_eq!(reach(&any, true, "other", 80), None);
        assert_eq!(reach(&any, false, "host", 443), Some(Reach::Local));
        assert!(is_plain_registry(&any, "plain", None) && !is_plain_registry(&any, "host", None));
        assert!(is_plain_registry(&some, "127.0.0.1", Some(5000)) && !is_plain_registry(&some, "host", None));
    }

    #[test]
    fn addresses_are_of_the_class_that_standards_give_them() {
        use AddressClass::{Local, Never, Private, Public};
        for (class, addresses) in [
            (Public, &["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::101:101"][..]),
            (
                Private,
                &[
                    "10.0.0.1",
                    "172.16.0.1",
                    "192.168.1.1",
                    "100.64.0.1",
                    "198.18.0.1",
                    "fd00::1",
                    "fc00::1",
                    "2001:db8::1",
                    "2002:7f00:1::",
                    "::ffff:10.0.0.1",
                    "64:ff9b::a00:1",
                    "1::1",
                ],
            ),
            (
                Local,
                &[
                    "127.0.0.1",
                    "127.255.255.254",
                    "169.254.169.254",
                    "100.100.100.200",
                    "168.63.129.16",
                    "192.0.0.192",
                    "::1",
                    "fe80::1",
                    "::ffff:127.0.0.1",
                    "::ffff:169.254.169.254",
                    "64:ff9b::7f00:1",
                    "64:ff9b::a9fe:a9fe",
                    "::127.0.0.1",
                    "::ffff:168.63.129.16",
                    "fd00:ec2::254",
                    "fd20:ce::254",
                ],
            ),
            (
                Never,
                &[
                    "0.0.0.0",
                    "0.1.2.3",
                    "224.0.0.1",
                    "239.1.1.1",
                    "240.0.0.1",
                    "255.255.255.255",
                    "::",
                    "ff02::1",
                    "::ffff:0.0.0.0",
                    "64:ff9b::",
                ],
            ),
        ] {
            for text in addresses {
                let address = text.parse().unwrap();
                assert_eq!(AddressClass::of(address), class, "{text}");
                let allowed =
                    [Reach::Public, Reach::Private, Reach::Local].map(|reach| reach.includes(address));
                let expected = match class {
                    Public => [true; 3],
                    Private => [false, true, true],
                    Local => [false, false, true],
                    Never => [false; 3],
                };
                assert_eq!(allowed, expected, "{text}");
            }
        }
    }
}
