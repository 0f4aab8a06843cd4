//! The reference of the HTTP interface and of a catalog's settings, from `docs/api/openapi.json`.
//!
//! Invariant: every route and every type of the document is in it, with its bounds.

use serde_json::Value;

const REF: &str = "#/components/schemas/";

/// All routes, then all types.
pub fn page(document: &Value) -> String {
    let mut text = String::from("\n## Routes\n\n| route | what it does |\n| --- | --- |\n");
    let routes: Vec<_> = routes(document).collect();
    for (method, path, route) in &routes {
        let name = string(route, "operationId");
        text += &format!(
            "| [`{method} {path}`](#{}) | {} |\n",
            name.to_lowercase(),
            cell(string(route, "summary"))
        );
    }
    for (method, path, route) in &routes {
        text += &format!("\n### {}\n\n`{method} {path}`\n", string(route, "operationId"));
        for part in
            ["summary", "description"].map(|part| string(route, part)).iter().filter(|p| !p.is_empty())
        {
            text += &format!("\n{}\n", part.trim());
        }
        text += &asked(route);
        text += &answered(route);
    }
    text += "\n## Types\n";
    for (name, schema) in members(&document["components"]["schemas"]) {
        text += &format!("\n### {name}\n\n{}\n{}", string(schema, "description").trim(), of_type(schema));
    }
    text
}

/// The fields of one type.
pub fn settings(document: &Value, name: &str) -> String {
    of_type(&document["components"]["schemas"][name])
}

fn routes(document: &Value) -> impl Iterator<Item = (String, &str, &Value)> {
    let paths = members(&document["paths"]);
    paths.flat_map(|(path, methods)| members(methods).map(move |(m, route)| (m.to_uppercase(), path, route)))
}

fn asked(route: &Value) -> String {
    let mut text = String::new();
    let parameters = route["parameters"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !parameters.is_empty() {
        text += "\n| parameter | in | type | meaning |\n| --- | --- | --- | --- |\n";
    }
    for parameter in parameters {
        let (name, place) = (string(parameter, "name"), string(parameter, "in"));
        let (kind, what) = (of_field(&parameter["schema"]), cell(string(parameter, "description")));
        text += &format!("| `{name}` | {place} | {kind} | {what} |\n");
    }
    if let Some(body) = content(&route["requestBody"]) {
        text += &format!("\nThe request's body is {body}.\n");
    }
    text
}

fn answered(route: &Value) -> String {
    let mut text = String::from("\n| status | body | meaning |\n| --- | --- | --- |\n");
    for (status, response) in members(&route["responses"]) {
        let body = content(response).unwrap_or_default();
        text += &format!("| {status} | {body} | {} |\n", cell(string(response, "description")));
    }
    text
}

/// What a body is: its type.
fn content(body: &Value) -> Option<String> {
    let (format, content) = members(&body["content"]).next()?;
    let schema = &content["schema"];
    Some(if schema.is_null() { format!("`{format}`") } else { of_field(schema) })
}

/// A table of an object's fields, or what else a type is.
fn of_type(schema: &Value) -> String {
    if let Some(parts) = ["oneOf", "allOf", "anyOf"].iter().find_map(|parts| schema[parts].as_array()) {
        return parts.iter().map(of_variant).collect();
    }
    if schema["properties"].is_null() {
        return format!("\nType: {}.\n", of_field(schema).replace("\\|", "|"));
    }
    let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut text = String::from("\n| field | type | meaning |\n| --- | --- | --- |\n");
    for (name, field) in members(&schema["properties"]) {
        let needed = if required.iter().any(|r| r == name) { ", required" } else { "" };
        text += &format!("| `{name}` | {}{needed} | {} |\n", of_field(field), cell(described(field)));
    }
    text
}

/// One of the forms that a type has.
fn of_variant(part: &Value) -> String {
    let (what, fields) = (cell(described(part)), !part["properties"].is_null());
    let kind = if fields { "an object".to_owned() } else { of_field(part) };
    let colon = if what.is_empty() { "" } else { ": " };
    format!("\n- {kind}{colon}{what}\n{}", if fields { of_type(part) } else { String::new() })
}

/// A field's description; of one that may be null it is that of what it is else.
fn described(field: &Value) -> &str {
    let of_parts = |parts: &str| {
        let parts = field[parts].as_array().map(Vec::as_slice).unwrap_or_default();
        parts.iter().map(|part| string(part, "description")).find(|text| !text.is_empty())
    };
    match string(field, "description") {
        "" => of_parts("oneOf").or_else(|| of_parts("allOf")).unwrap_or_default(),
        text => text,
    }
}

/// A field's type in words, with its bounds.
fn of_field(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|to| to.strip_prefix(REF)) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    for parts in ["oneOf", "allOf", "anyOf"] {
        if let Some(parts) = schema[parts].as_array() {
            let parts = parts.iter().filter(|part| part["type"] != "null").map(of_field);
            return parts.collect::<Vec<_>>().join(" or ");
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| format!("`{}`", plain(value))).collect::<Vec<_>>().join(" or ");
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").map(plain).unwrap_or_default(),
        kind => plain(kind),
    };
    let mut text = match kind.as_str() {
        "array" => format!("list of {}", of_field(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map to {}", of_field(&schema["additionalProperties"]))
        }
        kind => kind.to_owned(),
    };
    match (&schema["minimum"], &schema["maximum"]) {
        (Value::Null, Value::Null) => {}
        (least, Value::Null) => text += &format!(", at least {}", number(least)),
        (Value::Null, most) => text += &format!(", at most {}", number(most)),
        (least, most) => text += &format!(", {} to {}", number(least), number(most)),
    }
    for (word, said) in [("multipleOf", "multiple of"), ("default", "by default"), ("pattern", "as")] {
        if !schema[word].is_null() {
            text += &format!(", {said} `{}`", cell(&number(&schema[word])));
        }
    }
    text
}

fn members(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value))
}

fn string<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A number as people write it: large ones that are whole units of memory, by these.
fn number(value: &Value) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = value.as_u64().filter(|n| *n >= 65_536).and_then(|n| {
        let (shift, unit) = units.iter().find(|(shift, _)| n % (1 << shift) == 0)?;
        Some(format!("{} {unit}", n >> shift))
    });
    unit.unwrap_or_else(|| plain(value))
}

/// A text that fits into a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn routes_and_types_are_told_with_their_bounds() {
        let document = json!({
            "paths": {"/v1/x/{name}": {"put": {
                "operationId": "changeX", "summary": "Changes an X.",
                "parameters": [{"name": "name", "in": "path", "schema": {"type": "string"}, "description": "Which X | Y."}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/X"}}}},
                "responses": {"200": {"description": "The X as it is then."}}}}},
            "components": {"schemas": {
                "X": {"description": "An X.", "required": ["n"], "properties": {
                    "n": {"type": "integer", "minimum": 1, "maximum": 9, "description": "How many."},
                    "k": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/K", "description": "Of which kind."}]}}},
                "K": {"description": "Kinds of an X.", "enum": ["a", "b"]}}}
        });
        let page = page(&document);
        for part in [
            "| [`PUT /v1/x/{name}`](#changex) | Changes an X. |",
            "### changeX\n\n`PUT /v1/x/{name}`\n\nChanges an X.\n",
            "| `name` | path | string | Which X \\| Y. |",
            "The request's body is [X](#x).",
            "| 200 |  | The X as it is then. |",
            "| `n` | integer, 1 to 9, required | How many. |",
            "| `k` | [K](#k) | Of which kind. |",
            "### K\n\nKinds of an X.\n\nType: `a` or `b`.",
        ] {
            assert!(page.contains(part), "no {part:?} in:\n{page}");
        }
    }
}
