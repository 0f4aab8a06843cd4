//! Texts that users of the API read: each description says something.
//!
//! Invariant: what is found is in the generated document, so that nothing that users see is left out.

use serde_json::Value;

/// A description of fewer words repeats the name of what it describes, or is a riddle.
const LEAST_WORDS: usize = 5;

/// Of these words a description may have any number: what it says lies in the others.
const FUNCTION_WORDS: &str = "a an the this that these those it its they them their he she who whom whose which what where when why \
    how is are was were be been being has have had do does did will would shall should can could may might must not no nor or and \
    but if then else so as at by for from in into of off on onto out over to up down with without within after before until till \
    since while any all each every some one two none other another same such only also too than more most less least yet still \
    again once here there now said meant good way called asked looked";
/// A description with fewer others has no noun, or only the name of what it describes.
const LEAST_OTHERS: usize = 2;

/// Descriptions in an OpenAPI document that are too short, or say too little.
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
                        } else if others(text) < LEAST_OTHERS {
                            found.push(format!(
                                "docs/api/openapi.json: {path}: '{text}' says too little: name what it is"
                            ));
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

/// How many words carry what a text says.
fn others(text: &str) -> usize {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words
        .filter(|word| FUNCTION_WORDS.split(' ').all(|function| !function.eq_ignore_ascii_case(word)))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_that_says_nothing_is_found_and_a_property_of_that_name_is_not() {
        let document = serde_json::json!({
            "a": { "description": "Its name." },
            "c": { "description": "What may not be meant so." },
            "b": [{ "description": "Name of the catalog that owns the machine." }],
            "properties": { "description": { "type": "string" } },
        });
        let found = breaches(&document);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("/a/description") && found[1].contains("/c/description"), "{found:?}");
    }
}
