//! Texts that users of the API read: each description says something.
//!
//! Invariant: what is found is in the generated document, so that nothing that users see is left out.

use serde_json::Value;

/// A description of fewer words repeats the name of what it describes, or is a riddle.
const LEAST_WORDS: usize = 5;

/// Descriptions in an OpenAPI document that are too short.
pub fn breaches(document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk(document, &mut String::new(), &mut found);
    found
}

fn walk(value: &Value, path: &mut String, found: &mut Vec<String>) {
    let length = path.len();
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                path.push('/');
                path.push_str(name);
                match member {
                    // Of a property of that name it is an object.
                    Value::String(text) if name == "description" => {
                        let words = text.split_whitespace().count();
                        if words < LEAST_WORDS {
                            found.push(format!("docs/api/openapi.json: {path}: '{text}' has {words} words"));
                        }
                    }
                    _ => walk(member, path, found),
                }
                path.truncate(length);
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                path.push_str(&format!("/{i}"));
                walk(item, path, found);
                path.truncate(length);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_that_says_nothing_is_found_and_a_property_of_that_name_is_not() {
        let document = serde_json::json!({
            "a": { "description": "Its name." },
            "b": [{ "description": "Name of the catalog that owns the machine." }],
            "properties": { "description": { "type": "string" } },
        });
        let found = breaches(&document);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("/a/description"), "{found:?}");
    }
}
