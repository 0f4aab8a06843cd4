//! Files of catalogs, of a host or of a fleet, TOML or JSON: read by `create`, `apply` and `diff`, written by `export`. Owns their format.
//!
//! Invariant: what is written is read back unchanged; an unknown or repeated name is refused rather than ignored.

use super::kind::FileSettings;
use crate::error::{Exit, Failure};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use spillway_api::{Name, nearest, parse_size, size_text};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest file.
const MOST_BYTES: u64 = 4 << 20;
/// Name of the list of settings that were left out when the file was written.
const REDACTED: &str = "redacted";
/// Name at the top of a file.
const TOP: &str = "catalogs";

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// TOML, with tables.
    Toml,
    /// JSON, with objects.
    Json,
}

/// A catalog of a file: what is sent to create it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NewObject<S> {
    /// Name of the catalog.
    pub name: Name,
    /// Its settings.
    pub spec: S,
}

/// Reads the catalogs of a file, or of standard input for `-`: at least one, in the order of their names.
pub fn read<S: FileSettings>(path: &Path) -> Result<Vec<NewObject<S>>, Failure> {
    let name = if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
    let format = match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => Some(Format::Toml),
        Some("json") => Some(Format::Json),
        _ => None,
    };
    parse(&text(path)?, format).map_err(|why| Failure::usage(format!("{name}: {why}")))
}

/// Reads the text of a file, or of standard input.
pub fn text(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let reading = if path == Path::new("-") {
        io::stdin().lock().take(MOST_BYTES + 1).read_to_string(&mut text)
    } else {
        File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text))
    };
    match reading {
        Ok(bytes) if bytes as u64 > MOST_BYTES => {
            Err(Failure::usage(format!("{}: it is larger than {}", path.display(), size_text(MOST_BYTES))))
        }
        Ok(_) => Ok(text),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            Err(Failure::new(Exit::Permission, format!("{}: {e}", path.display())))
        }
        Err(e) => Err(Failure::usage(format!("{}: {e}", path.display()))),
    }
}

fn parse<S: FileSettings>(text: &str, format: Option<Format>) -> Result<Vec<NewObject<S>>, String> {
    let guessed = if text.trim_start().starts_with('{') { Format::Json } else { Format::Toml };
    let StrictValue(whole) = match format.unwrap_or(guessed) {
        Format::Json => serde_json::from_str(text).map_err(|e| e.to_string())?,
        Format::Toml => toml::from_str(text).map_err(|e| {
            let line = e.span().map(|span| text[..span.start].lines().count().max(1));
            let place = line.map_or(String::new(), |line| format!("line {line}: "));
            format!("{place}{}", e.message().replace('\n', "; "))
        })?,
    };
    let Value::Object(mut whole) = whole else { return Err(format!("it has no '{TOP}' at its top")) };
    let catalogs = whole.remove(TOP);
    if let Some(word) = whole.keys().next() {
        return Err(unknown(word, &[TOP.to_owned()]));
    }
    let Some(Value::Object(catalogs)) = catalogs else {
        return Err(format!(
            "it names no catalogs: begin with [{TOP}.NAME] in TOML, {{\"{TOP}\": {{...}}}} in JSON"
        ));
    };
    if catalogs.is_empty() {
        return Err("it names no catalogs".into());
    }
    let read = |(name, settings): (String, Value)| {
        let catalog = name.parse::<Name>().map_err(|e| e.to_string())?;
        let spec = spec(settings).map_err(|why| format!("catalog {name}: {why}"))?;
        Ok(NewObject { name: catalog, spec })
    };
    catalogs.into_iter().map(read).collect()
}

fn spec<S: FileSettings>(settings: Value) -> Result<S, String> {
    let Value::Object(mut settings) = settings else { return Err("its settings are a table".into()) };
    let (usual, known) = (S::defaults().object(), S::names());
    if let Some(names) = settings.get(REDACTED) {
        let names: Vec<&str> = names.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let names = if names.is_empty() { "something".into() } else { names.join(", ") };
        return Err(format!(
            "{names} was left out when this was exported, since the role 'read' may not see it: export it again with the \
             role 'operate' or 'admin', or say what it is to be and remove '{REDACTED}'"
        ));
    }
    for (name, value) in &mut settings {
        if !known.contains(name) {
            let elsewhere = S::elsewhere(name).map(|where_else| format!("{name}: {where_else}"));
            return Err(elsewhere.unwrap_or_else(|| unknown(name, &known)));
        }
        if let (true, Value::String(words)) = (name.ends_with("_bytes"), &*value) {
            *value = parse_size(words).map_err(|why| format!("{name}: '{words}': {why}"))?.into();
        }
    }
    if !settings.contains_key("image") {
        return Err("it has no image".into());
    }
    serde_json::from_value(Value::Object(settings.clone())).map_err(|e| {
        // The error does not say which setting is wrong: find the one that is wrong on its own.
        let wrong = |name: &&String| {
            let mut one = usual.clone();
            one.insert((*name).clone(), settings[*name].clone());
            serde_json::from_value::<S>(Value::Object(one)).is_err()
        };
        settings.keys().find(wrong).map_or_else(|| e.to_string(), |name| format!("{name}: {e}"))
    })
}

/// Error for an unknown setting. A name without its unit is understood as the one with it.
fn unknown(word: &str, known: &[String]) -> String {
    let with_unit =
        known.iter().find(|name| name.strip_prefix(word).is_some_and(|rest| rest.starts_with('_')));
    let near = with_unit.map(String::as_str).or_else(|| nearest(word, known.iter().map(String::as_str)));
    let hint = near.map_or(String::new(), |near| format!(": do you mean '{near}'?"));
    format!("there is no setting '{}'{hint}", word.escape_debug())
}

/// Writes a file with these catalogs, without defaults.
pub fn write<'a, S: FileSettings + 'a>(
    catalogs: impl IntoIterator<Item = (&'a Name, &'a S)>,
    format: Format,
) -> String {
    let usual = S::defaults().object();
    let settings = |spec: &S| {
        let fields = spec.object().into_iter();
        let said = fields.filter(|(name, value)| name == "image" || usual.get(name) != Some(value));
        let mut said: Vec<(String, OrderedValue)> =
            said.map(|(name, value)| written(name, value, format)).collect();
        // Important settings come first; tables come last, as TOML requires.
        let first = ["image", "count", "type", "mode"];
        let place = |name: &str| first.iter().position(|f| *f == name).unwrap_or(first.len());
        said.sort_by_key(|(name, node)| (matches!(node, OrderedValue::Leaf(Value::Object(_))), place(name)));
        OrderedValue::Table(said)
    };
    let catalogs = catalogs.into_iter().map(|(name, spec)| (name.to_string(), settings(spec)));
    let whole = OrderedValue::Table(vec![(TOP.into(), OrderedValue::Table(catalogs.collect()))]);
    match format {
        Format::Toml => toml::to_string_pretty(&whole).expect("what is wanted can be written"),
        Format::Json => format!("{}\n", serde_json::to_string_pretty(&whole).expect("it is plain data")),
    }
}

/// Writes sizes with units in TOML, which is for people and whose numbers have 63 bits.
fn written(name: String, value: Value, format: Format) -> (String, OrderedValue) {
    let value = match value.as_u64() {
        Some(bytes) if format == Format::Toml && name.ends_with("_bytes") => size_text(bytes).into(),
        _ => value,
    };
    (name, OrderedValue::Leaf(value))
}

/// A value whose fields are written in this order.
enum OrderedValue {
    Table(Vec<(String, OrderedValue)>),
    Leaf(Value),
}

impl Serialize for OrderedValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            OrderedValue::Leaf(value) => value.serialize(serializer),
            OrderedValue::Table(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(name, node)| map.serialize_entry(name, node))?;
                map.end()
            }
        }
    }
}

/// Any value without repeated names: one of two would be ignored silently.
struct StrictValue(Value);

impl<'de> Deserialize<'de> for StrictValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<StrictValue, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(StrictValue)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(StrictValue(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let StrictValue(value) = fields.next_value()?;
            if all.contains_key(&name) {
                return Err(A::Error::custom(format!("'{}' stands there twice", name.escape_debug())));
            }
            all.insert(name, value);
        }
        Ok(Value::Object(all))
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
