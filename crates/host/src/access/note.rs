//! Notes for the audit log that a route makes about its request: what was requested, the machines concerned, and the
//! settings that have changed. Owns these notes while the request is answered.
//!
//! Invariant: a note is bounded whatever a client sends, and contains only requests that were understood, and no secret.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::Serialize;
use serde_json::{Map, Value};
use spillway_api::{CatalogSpec, Difference, settings};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

/// Number of machine names, and of items of a list, that are kept.
const MAX_ITEMS: usize = 32;
/// Number of settings that are kept.
const MAX_SETTINGS: usize = 128;
/// Longest text that is kept, in characters.
const MAX_CHARACTERS: usize = 256;
/// Placeholder for a secret value.
const SECRET: &str = "(secret)";

/// Notes about a request. A clone is the same notes.
#[derive(Clone, Debug, Default)]
pub struct RequestNote(Arc<Mutex<AuditNotes>>);

/// Content of the notes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct AuditNotes {
    /// The verb, if the body contains it.
    #[serde(skip)]
    pub verb: Option<String>,
    /// Name of the object, if the body contains it.
    #[serde(skip)]
    pub name: Option<String>,
    /// Machines concerned, up to a bound.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    machines: Vec<String>,
    /// Number of further machines.
    #[serde(skip_serializing_if = "is_zero")]
    more_machines: usize,
    /// Values of the request, by their names in the API.
    #[serde(skip_serializing_if = "Map::is_empty")]
    asked: Map<String, Value>,
    /// Settings that have changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changed: Vec<FieldChange>,
    /// Whether an earlier request with the same `Idempotency-Key` had done it already.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    repeated: bool,
    /// Whether the request only checked what would happen.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dry_run: bool,
    /// Whether a change was recorded, even if the request failed afterwards.
    #[serde(skip)]
    pub has_recorded: bool,
}

/// A setting that has changed.
#[derive(Clone, Debug, Serialize)]
struct FieldChange {
    field: String,
    old: Value,
    new: Value,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl RequestNote {
    /// Notes the verb that the body contains.
    pub fn verb(&self, verb: impl Into<String>) {
        self.noted().verb = Some(verb.into());
    }

    /// Notes the object's name that the body contains.
    pub fn name(&self, name: &str) {
        self.noted().name = Some(short(name));
    }

    /// Notes machines that the request concerns.
    pub fn machines<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut noted = self.noted();
        for name in names {
            match noted.machines.len() < MAX_ITEMS {
                true => noted.machines.push(name.into()),
                false => noted.more_machines += 1,
            }
        }
    }

    /// Notes the request's body, which was parsed.
    pub fn asked(&self, body: &impl Serialize) {
        let Ok(body) = serde_json::to_value(body) else { return };
        let mut noted = self.noted();
        flatten(String::new(), body, &mut noted.asked);
    }

    /// Notes the request's query, which was parsed.
    pub fn asked_beside(&self, query: &str) {
        let query = query.chars().take(MAX_CHARACTERS).collect::<String>();
        self.noted().asked.insert("query".into(), query.into());
    }

    /// Settings of a catalog that have become others.
    pub fn changed(&self, differences: Vec<Difference>) {
        let changed = |Difference { setting, now, then, .. }| {
            let is_secret = CatalogSpec::is_secret(&setting);
            let value = |value: Value| match is_secret && !value.is_null() {
                true => SECRET.into(),
                false => bounded(value),
            };
            FieldChange { old: value(now), new: value(then), field: setting }
        };
        self.noted().changed = differences.into_iter().take(MAX_SETTINGS).map(changed).collect();
    }

    /// The settings of a new catalog.
    pub fn made(&self, spec: &CatalogSpec) {
        let usual = CatalogSpec { image: spec.image.clone(), ..CatalogSpec::defaults() };
        let (usual, said) = (settings(&usual), settings(spec));
        let new = said.into_iter().filter(|(name, value)| name == "image" || usual.get(name) != Some(value));
        let difference = |(setting, then)| Difference { setting, now: Value::Null, then, live: false };
        self.changed(new.map(difference).collect());
        // It would say the same again.
        self.noted().asked.clear();
    }

    /// Notes that the request only checks what would happen.
    pub fn dry_run(&self) {
        self.noted().dry_run = true;
    }

    /// Notes that a change of a machine was recorded.
    pub fn recorded(&self, machine: &str) {
        self.machines([machine]);
        self.noted().has_recorded = true;
    }

    /// Notes that an earlier request had done it.
    pub fn repeated(&self) {
        self.noted().repeated = true;
    }

    /// Takes all notes.
    pub fn take(&self) -> AuditNotes {
        std::mem::take(&mut *self.noted())
    }

    fn noted(&self) -> MutexGuard<'_, AuditNotes> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RequestNote {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<RequestNote, Infallible> {
        Ok(parts.extensions.get::<RequestNote>().cloned().unwrap_or_default())
    }
}

fn short(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARACTERS) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

fn bounded(value: Value) -> Value {
    match value {
        Value::String(text) => short(&text).into(),
        Value::Array(items) => items.into_iter().take(MAX_ITEMS).map(bounded).collect(),
        // Settings are flat: a deeper value is kept whole or not at all.
        Value::Object(fields) => short(&Value::Object(fields).to_string()).into(),
        plain => plain,
    }
}

/// Adds each field by its path, with dots. Null means that the field was left out.
fn flatten(name: String, value: Value, into: &mut Map<String, Value>) {
    let last = name.rsplit('.').next().unwrap_or_default();
    if into.len() >= MAX_SETTINGS || value.is_null() {
        return;
    }
    if CatalogSpec::is_secret(last) {
        into.insert(name, SECRET.into());
        return;
    }
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let below = if name.is_empty() { field } else { format!("{name}.{field}") };
                flatten(below, value, into);
            }
        }
        value => _ = into.insert(short(&name), bounded(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn noted(note: &RequestNote) -> Value {
        serde_json::to_value(note.take()).unwrap()
    }

    #[test]
    fn secrets_are_not_in_it() {
        let note = RequestNote::default();
        let spec: CatalogSpec =
            serde_json::from_value(json!({ "image": "debian", "count": 2, "user_data": "hunter2" })).unwrap();
        note.asked(&json!({ "name": "desk", "spec": spec, "force": false, "none": null }));
        let asked = noted(&note);
        let asked = &asked["asked"];
        assert_eq!((&asked["spec.user_data"], &asked["spec.count"]), (&json!(SECRET), &json!(2)), "{asked}");
        assert!(asked.get("none").is_none() && !asked.to_string().contains("hunter2"), "{asked}");
        let before = CatalogSpec { user_data: Some("hunter1".into()), ..spec.clone() };
        let name = "desk".parse().unwrap();
        note.changed(spillway_api::differences(&name, &before, &CatalogSpec { count: 3, ..spec.clone() }));
        let changed = noted(&note);
        let want = json!([
            { "field": "count", "old": 2, "new": 3 },
            { "field": "user_data", "old": SECRET, "new": SECRET },
        ]);
        assert_eq!(changed["changed"], want);
        note.made(&spec);
        let made = noted(&note);
        let fields: Vec<&str> =
            made["changed"].as_array().unwrap().iter().map(|c| c["field"].as_str().unwrap()).collect();
        assert_eq!(fields, ["count", "image", "user_data"]);
        assert!(!made.to_string().contains("hunter"), "{made}");
    }

    #[test]
    fn it_is_bounded() {
        let note = RequestNote::default();
        let names: Vec<String> = (0..10_000).map(|n| format!("desk-{n}")).collect();
        note.machines(names.iter().map(String::as_str));
        let labels: Map<String, Value> =
            (0..10_000).map(|n| (n.to_string(), Value::from("é".repeat(10_000)))).collect();
        note.asked(&json!({ "names": names, "labels": labels }));
        note.asked_beside(&"x".repeat(100_000));
        let text = noted(&note).to_string();
        assert!(text.contains(r#""more_machines":9968"#) && text.len() < 100_000, "{}", text.len());
    }
}
