//! Reading and writing the nouns.

use fir_bench::schema::{Axis, Definition, Expr, Solution, Status, Trace, import_definition};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support;

#[test]
fn a_definition_is_read_and_its_axes_found() {
    let d = Definition::from_value(&support::definition()).unwrap();
    assert_eq!(d.axes(), [("batch".into(), Axis::Var), ("hidden".into(), Axis::Const(8))]);
    assert_eq!(d.axes_of(&[Some(&[5, 8]), None]).unwrap()["batch"], 5);
    let wrong = d.axes_of(&[Some(&[5, 7]), None]).unwrap_err().to_string();
    assert_eq!(wrong, "axes_of: `x` has hidden = 7, not 8");
    let wrong = d.axes_of(&[Some(&[5]), None]).unwrap_err().to_string();
    assert_eq!(wrong, "axes_of: `x` has 1 dimensions, not 2");
}

#[test]
fn what_breaks_a_rule_is_refused_with_file_field_and_rule() {
    let cases: &[(&str, Value, &str)] = &[
        ("/name", json!(""), "`name`: must not be empty"),
        ("/op_type", json!(3), "`op_type`: must be a string, not a number"),
        ("/axes/hidden/value", json!(-1), "`axes.hidden.value`: must be a whole number from 0 on, not -1"),
        ("/axes/hidden/type", json!("dyn"), "`axes.hidden.type`: must be \"const\" or \"var\", not \"dyn\""),
        ("/inputs/x/shape/1", json!("nope"), "`inputs.x.shape.1`: \"nope\" is not among `axes`"),
        ("/reference", json!("run = lambda x: x"), "`reference`: must define a function `run` at its top level"),
        ("/reference", json!("async def run(x): pass"), "`reference`: must define a function `run` at its top level"),
        ("/reference", json!("def run(x:\n  (1"), "`reference`: line 2: `(` is not closed"),
        ("/constraints", Value::Null, "`constraints`: must be a list, not null"),
        ("/constraints/0", json!("a == ("), "`constraints`: `a == (` line 1: `(` is not closed"),
        ("/outputs", json!({"x": {"shape": null, "dtype": "int8"}}), "`outputs.x`: has the name of an input"),
    ];
    for (pointer, value, want) in cases {
        let mut broken = support::definition();
        *broken.pointer_mut(pointer).unwrap() = value.clone();
        let error = Definition::parse(&broken.to_string(), "d.json").unwrap_err().to_string();
        assert_eq!(error, format!("d.json: {want}"));
    }
    let mut broken = support::definition();
    broken["inputs"]["x"].as_object_mut().unwrap().remove("shape");
    let error = Definition::parse(&broken.to_string(), "d.json").unwrap_err().to_string();
    assert_eq!(error, "d.json: `inputs.x.shape`: is required");
    let error = Definition::parse("{", "d.json").unwrap_err().to_string();
    assert!(error.starts_with("d.json: `$`: is not JSON"), "{error}");
}

#[test]
fn a_trace_holds_what_its_status_asks_for() {
    let workload = json!({"axes": {}, "inputs": {}, "uuid": "u"});
    let base = |status: &str, correctness: Value, performance: Value| {
        json!({"definition": "d", "workload": workload, "solution": "s", "evaluation": {
            "status": status, "environment": {"hardware": "h"}, "timestamp": "t",
            "correctness": correctness, "performance": performance}})
    };
    let (c, p) = (json!({"max_relative_error": "Infinity", "max_absolute_error": "NaN"}), json!({"latency_ms": 1.5}));
    let good = Trace::from_value(&base("PASSED", c.clone(), p.clone())).unwrap();
    let (errors, times) = good.passed().unwrap();
    assert!(errors.max_absolute_error.is_nan() && errors.max_relative_error.is_infinite());
    assert_eq!(times.latency_ms, 1.5);
    for (status, c, p, ok) in [
        ("PASSED", c.clone(), Value::Null, false),
        ("PASSED", Value::Null, p.clone(), false),
        ("INCORRECT_NUMERICAL", c.clone(), Value::Null, true),
        ("INCORRECT_NUMERICAL", c.clone(), p.clone(), false),
        ("TIMEOUT", Value::Null, Value::Null, true),
        ("TIMEOUT", c, Value::Null, false),
        ("NO_SUCH", Value::Null, Value::Null, false),
    ] {
        assert_eq!(Trace::from_value(&base(status, c, p)).is_ok(), ok, "{status}");
    }
    let mut half = base("TIMEOUT", Value::Null, Value::Null);
    half["solution"] = Value::Null;
    assert_eq!(Trace::from_value(&half).unwrap_err().to_string(), "trace: `evaluation`: has no `solution`");
}

#[test]
fn bare_words_for_numbers_that_are_none_are_read() {
    let text = r#"{"definition": "NaN Infinity", "solution": "s", "workload": {"axes": {}, "inputs": {}, "uuid": "\"u"},
        "evaluation": {"status": "INCORRECT_NUMERICAL", "environment": {"hardware": "h"}, "timestamp": "t",
        "correctness": {"max_relative_error": NaN, "max_absolute_error": Infinity}, "performance": null}}"#;
    let trace = Trace::parse(text, "t").unwrap();
    assert_eq!(trace.definition(), "NaN Infinity");
    let evaluation = trace.evaluation().unwrap();
    assert_eq!(evaluation.status(), Status::IncorrectNumerical);
    assert!(evaluation.correctness().unwrap().max_relative_error.is_nan());
    assert_eq!(trace.to_json(), text);
}

#[test]
fn what_is_made_reads_back_as_it_was() {
    for (i, status) in Status::ALL.into_iter().enumerate() {
        let trace = support::trace("s", &support::workload(3, "u"), status, 0.5 + i as f64);
        assert_eq!(Trace::parse(trace.to_json(), "t").unwrap(), trace);
        assert_eq!(trace.evaluation().unwrap().status(), status);
    }
}

#[test]
fn the_newer_dialect_is_imported_with_notes() {
    let emitted = json!({
        "name": "x", "op_type": "norm", "tags": null,
        "axes": {"n": {"type": "const"}, "m": {"type": "var"}},
        "inputs": {"a": {"shape": ["m", "n"], "dtype": "float32", "optional": true}, "b": {"shape": ["k"], "dtype": "uint8"},
            "mode": {"shape": null, "dtype": "string"}},
        "outputs": {"a": {"shape": ["m", "n"], "dtype": "float32"}, "c": {"shape": ["m"], "dtype": "float64"}},
        "reference": "import torch\n\ndef helper(x): return x\n\ndef _x_reference(a, b, mode):\n    return a\n",
    });
    let (definition, notes) = import_definition(&emitted.to_string(), "x.json").unwrap();
    assert_eq!(definition.axes()[0].1, Axis::Var);
    assert_eq!(definition.outputs().len(), 1);
    assert!(definition.reference().contains("return _x_reference(*args, **kwargs)"));
    assert!(definition.to_json().contains("\"optional\": true"));
    assert_eq!(notes.len(), 8, "{notes:#?}");
    let (same, notes) = import_definition(&support::definition().to_string(), "d").unwrap();
    assert_eq!((same.name(), notes.len()), ("scale_h8", 0));
    assert!(import_definition("[]", "d").is_err());
}

proptest! {
    #[test]
    fn no_text_is_too_strange_to_be_refused(text in "[\\PC\n\"'(){}\\[\\]:,=<>*/%.]{0,120}", at in 0usize..900, cut in 0usize..40) {
        let _ = Expr::parse(&text);
        let mut broken: Vec<char> = support::definition().to_string().chars().collect();
        let at = at.min(broken.len());
        let end = (at + cut).min(broken.len());
        broken.splice(at..end, text.chars());
        let broken: String = broken.into_iter().collect();
        let _ = (Trace::parse(&broken, "t"), Solution::parse(&broken, "s"), import_definition(&broken, "i"));
        // What is read is what is written.
        if let Ok(definition) = Definition::parse(&broken, "d") {
            prop_assert_eq!(definition.to_json(), broken);
        }
        let mut value = support::definition();
        value["reference"] = text.clone().into();
        value["constraints"] = json!([text]);
        let _ = Definition::from_value(&value);
    }
}
