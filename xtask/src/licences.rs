//! Whose code comes with ours: where each dependency is from, and under which licence.
//!
//! Owns the list of licences that may come in. Invariant: what names no licence, or is from no registry, is a breach.

use serde::Deserialize;
use spdx::{Expression, LicenseReq, ParseMode};

/// Licences that code under MIT OR Apache-2.0 may link, by their names in SPDX.
const ALLOWED: &[&str] = &["Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Zlib"];

/// What is used of `cargo metadata`.
#[derive(Deserialize)]
pub struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// Where it is from; `None` for what lies in this repository.
    source: Option<String>,
}

/// Every package that may not come in, and why.
pub fn breaches(metadata: &Metadata) -> Vec<String> {
    metadata.packages.iter().flat_map(|package| package.faults()).collect()
}

impl Package {
    fn faults(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.source.as_ref().is_some_and(|source| !source.starts_with("registry+")) {
            found.push("is not from a registry, so that its version can change".to_string());
        }
        let licence = self.license.as_deref().unwrap_or_default();
        match Expression::parse_mode(licence, ParseMode::LAX) {
            Ok(expression) if expression.evaluate(is_allowed) => {}
            Ok(_) => found.push(format!("its licence '{licence}' is not among those allowed")),
            Err(e) => found.push(format!("its licence '{licence}' is not an SPDX expression: {}", e.reason)),
        }
        found.into_iter().map(|fault| format!("{} {}: {fault}", self.name, self.version)).collect()
    }
}

/// It is of the list. An exception (`WITH`) changes nothing: it only adds permissions.
fn is_allowed(licence: &LicenseReq) -> bool {
    licence.license.id().is_some_and(|id| ALLOWED.contains(&id.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(license: Option<&str>, source: Option<&str>) -> Vec<String> {
        let package = Package {
            name: "x".into(),
            version: "1.0.0".into(),
            license: license.map(Into::into),
            source: source.map(Into::into),
        };
        breaches(&Metadata { packages: vec![package] })
    }

    #[test]
    fn of_several_licences_one_is_enough_unless_all_are_meant() {
        for licence in ["MIT", "MIT OR LGPL-2.1-or-later", "MIT/Apache-2.0", "Apache-2.0 AND ISC"] {
            assert_eq!(faults(Some(licence), Some("registry+https://x")), Vec::<String>::new(), "{licence}");
        }
        for licence in ["GPL-3.0-only", "MIT AND GPL-2.0-only"] {
            let found = faults(Some(licence), None);
            assert!(found.len() == 1 && found[0].contains("not among those allowed"), "{licence}: {found:?}");
        }
    }

    #[test]
    fn what_names_no_licence_or_no_registry_is_found() {
        assert!(faults(None, None)[0].contains("not an SPDX expression"));
        assert!(faults(Some("Whatever"), None)[0].contains("not an SPDX expression"));
        let found = faults(Some("MIT"), Some("git+https://x/y?branch=main"));
        assert!(found.len() == 1 && found[0].contains("x 1.0.0: is not from a registry"), "{found:?}");
    }
}
