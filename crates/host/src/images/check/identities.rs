//! Finds identities and secrets that a machine creates for itself, and that clones of its image would share. Owns the form
//! of the rules and how they are applied; the rules themselves are in `table`.
//!
//! Invariant: a file that is empty, or has no such setting, is no finding.

mod table;

use super::reader::{FileKind, FolderEntry, Reader};
use super::rules::finding;
use crate::error::HostError;
use spillway_api::{Finding, FindingKind, Severity};
use table::GROUPS;

/// A rule about a file that belongs to one machine.
pub struct IdentityRule {
    /// Folder of the file.
    pub folder: &'static str,
    /// Patterns of its name, separated by `|`. A `*` stands for any characters.
    pub name: &'static str,
    /// Condition on the file's content.
    pub when: IdentityCondition,
    kind: FindingKind,
    pub severity: Severity,
    /// Description of the identity.
    pub what: &'static str,
    why: &'static str,
    pub remedy: &'static str,
}

/// Condition under which a file's content belongs to one machine.
#[derive(Clone, Copy)]
pub enum IdentityCondition {
    /// Any content.
    NotEmpty,
    /// Any content but `uninitialized`.
    Initialized,
    /// A line that begins with this text.
    Line(&'static str),
    /// A setting of this name with a value: `name = value`, `name: value`, `"name": "value"` or `name value`.
    Set(&'static str),
}

/// Applies the rules to a system.
pub fn find(root: &Reader) -> Result<Vec<Finding>, HostError> {
    let mut found = Vec::new();
    for identity in GROUPS.iter().flat_map(|(_, rows)| *rows) {
        found.extend(identity.look(root)?);
    }
    Ok(found)
}

impl IdentityRule {
    fn look(&self, root: &Reader) -> Result<Option<Finding>, HostError> {
        let listed = root.list(self.folder)?;
        let is_one = |entry: &&FolderEntry| {
            let fits = || self.name.split('|').any(|pattern| fits(pattern, &entry.name));
            entry.kind == FileKind::File && entry.size_bytes > 0 && fits()
        };
        let mut found = Vec::new();
        for entry in listed.iter().filter(is_one) {
            let path = format!("{}/{}", self.folder, entry.name);
            // If only the existence of a file counts, any match is enough.
            if found.len() < MOST_READ && self.when.holds(|| root.text(&path))? {
                found.push(path);
            }
        }
        let Some(first) = found.first() else { return Ok(None) };
        let path = match found.len() {
            1 => first.clone(),
            more => format!("{first} and {} more", more - 1),
        };
        Ok(Some(finding(self.kind, self.severity, path, self.what, self.why, self.remedy)))
    }
}

/// Number of files that are read for one rule.
const MOST_READ: usize = 32;

impl IdentityCondition {
    fn holds(self, text: impl Fn() -> Result<Option<String>, HostError>) -> Result<bool, HostError> {
        Ok(match self {
            IdentityCondition::NotEmpty => true,
            IdentityCondition::Initialized => {
                text()?.is_some_and(|text| !matches!(text.trim(), "" | "uninitialized"))
            }
            IdentityCondition::Line(beginning) => {
                text()?.is_some_and(|text| text.lines().any(|line| line.trim_start().starts_with(beginning)))
            }
            IdentityCondition::Set(name) => {
                text()?.is_some_and(|text| text.lines().any(|line| is_set(line, name)))
            }
        })
    }
}

/// Whether a line gives a setting a value.
fn is_set(line: &str, name: &str) -> bool {
    let line = line.trim().trim_start_matches(['"', '\'']);
    let Some(rest) = line.strip_prefix(name) else { return false };
    let rest = rest.trim_start_matches(['"', '\'']);
    if !rest.starts_with(|c: char| c.is_whitespace() || c == '=' || c == ':') {
        return false;
    }
    let value = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '=' || c == ':');
    // A quoted value may be empty.
    let value = value.trim_start_matches(['"', '\'']);
    value.starts_with(|c: char| c.is_alphanumeric() || "-_.$%/+{[(<".contains(c))
}

/// Whether a name matches a pattern.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = pattern.rsplit_once('*').map(|(_, last)| last) else { return rest.is_empty() };
    let Some(middle) = rest.strip_suffix(last) else { return false };
    rest = middle;
    let between = pattern.split('*').count().saturating_sub(2);
    for part in parts.take(between) {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[cfg(test)]
mod tests;
