//! Constraints of a definition: the part of Python's expressions that shapes and launch sizes need, evaluated.
//!
//! Names are axes; an input tensor has `.shape[i]`, and `t[i].item()` where its numbers are known. What needs a number that
//! is not known is undecided, and not wrong.

/// What is known when an expression is evaluated.
pub trait Facts {
    /// Value of an axis, or of a scalar input.
    fn axis(&self, name: &str) -> Option<i64>;
    /// Shape of an input.
    fn shape(&self, _tensor: &str) -> Option<Vec<usize>> {
        None
    }
    /// Element of a one-dimensional integer input.
    fn element(&self, _tensor: &str, _index: i64) -> Option<i64> {
        None
    }
}

/// A value: Python's booleans are numbers too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A whole number.
    Int(i64),
    /// Any other.
    Float(f64),
}

impl Number {
    fn float(self) -> f64 {
        match self {
            Self::Int(i) => i as f64,
            Self::Float(f) => f,
        }
    }

    /// Whether Python takes it as true.
    pub fn truth(self) -> bool {
        self.float() != 0.0
    }
}

/// An expression. It is a line of text: what is kept are its words, and evaluating reads them again.
#[derive(Clone, Debug, PartialEq)]
pub struct Expr(Vec<String>);

/// Operators by how tightly they bind, loosest first.
const LEVELS: [&[&str]; 5] =
    [&["or"], &["and"], &["==", "!=", "<=", ">=", "<", ">"], &["+", "-"], &["*", "//", "/", "%"]];

impl Expr {
    /// Reads an expression, or says what in it is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        struct Nothing;
        impl Facts for Nothing {
            fn axis(&self, _: &str) -> Option<i64> {
                None
            }
        }
        let expr = Self(tokens(text)?);
        expr.run(&Nothing).map(|_| expr)
    }

    /// Its value; `None` when it needs what `facts` do not know, or divides by zero.
    pub fn eval(&self, facts: &dyn Facts) -> Option<Number> {
        self.run(facts).ok().flatten()
    }

    fn run(&self, facts: &dyn Facts) -> Value {
        let mut parser = Parser { tokens: &self.0, facts, depth: 0 };
        let value = parser.level(0)?;
        match parser.tokens.first() {
            None => Ok(value),
            Some(token) => Err(format!("`{token}` is not expected")),
        }
    }
}

/// A number, `None` if it is not known, or what is not understood.
type Value = Result<Option<Number>, String>;

/// `and`, `or`: an undecided side does not matter when the other decides.
fn logic(op: &str, a: Option<Number>, b: Option<Number>) -> Option<Number> {
    let decides = |x: &Number| x.truth() == (op == "or");
    match a {
        Some(a) if decides(&a) => Some(a),
        Some(_) => b,
        None => b.filter(decides),
    }
}

fn binary(op: &str, a: Number, b: Number) -> Option<Number> {
    let compared = |holds: fn(std::cmp::Ordering) -> bool| {
        let ordering = match (a, b) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            _ => a.float().partial_cmp(&b.float()),
        };
        Some(Number::Int(i64::from(ordering.is_some_and(holds))))
    };
    // Python's `//` and `%` round towards minus infinity.
    let result = match (op, a, b) {
        ("==", ..) => return compared(|o| o.is_eq()),
        ("!=", ..) => return compared(|o| o.is_ne()),
        ("<=", ..) => return compared(|o| o.is_le()),
        (">=", ..) => return compared(|o| o.is_ge()),
        ("<", ..) => return compared(|o| o.is_lt()),
        (">", ..) => return compared(|o| o.is_gt()),
        ("+", Number::Int(a), Number::Int(b)) => Number::Int(a.checked_add(b)?),
        ("-", Number::Int(a), Number::Int(b)) => Number::Int(a.checked_sub(b)?),
        ("*", Number::Int(a), Number::Int(b)) => Number::Int(a.checked_mul(b)?),
        ("//", Number::Int(a), Number::Int(b)) => {
            Number::Int(a.checked_div(b)? - i64::from(a % b != 0 && (a < 0) != (b < 0)))
        }
        ("%", Number::Int(a), Number::Int(b)) => Number::Int((a.checked_rem(b)? + b) % b),
        ("**", Number::Int(a), Number::Int(b)) => Number::Int(a.checked_pow(u32::try_from(b).ok()?)?),
        ("/" | "//" | "%", _, b) if b.float() == 0.0 => return None,
        ("+", ..) => Number::Float(a.float() + b.float()),
        ("-", ..) => Number::Float(a.float() - b.float()),
        ("*", ..) => Number::Float(a.float() * b.float()),
        ("/", ..) => Number::Float(a.float() / b.float()),
        ("//", ..) => Number::Float((a.float() / b.float()).floor()),
        ("%", ..) => Number::Float(a.float() - (a.float() / b.float()).floor() * b.float()),
        ("**", ..) => Number::Float(a.float().powf(b.float())),
        _ => return None,
    };
    Some(result)
}

fn tokens(text: &str) -> Result<Vec<String>, String> {
    let (mut out, mut rest) = (Vec::new(), text.trim());
    while let Some(c) = rest.chars().next() {
        let two = rest.get(..2).filter(|t| ["==", "!=", "<=", ">=", "//", "**"].contains(t));
        let len = if c.is_alphabetic() || c == '_' {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if c.is_ascii_digit() {
            rest.find(|c: char| !c.is_ascii_digit() && c != '_' && c != '.').unwrap_or(rest.len())
        } else if two.is_some() {
            2
        } else if "+-*/%<>()[],.".contains(c) {
            1
        } else {
            return Err(format!("`{c}` is not understood"));
        };
        out.push(rest[..len].to_owned());
        rest = rest[len..].trim_start();
    }
    Ok(out)
}

/// Nesting that is read; deeper text is refused rather than allowed to exhaust the stack.
const DEEPEST: usize = 64;

struct Parser<'a> {
    tokens: &'a [String],
    facts: &'a dyn Facts,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Result<&'a str, String> {
        let (first, rest) = self.tokens.split_first().ok_or("ends too early")?;
        self.tokens = rest;
        Ok(first)
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.tokens.first().is_some_and(|t| t == token);
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }

    fn expect(&mut self, tokens: &[&str]) -> Result<(), String> {
        tokens.iter().try_for_each(|t| if self.take(t) { Ok(()) } else { Err(format!("`{t}` is missing")) })
    }

    /// A level down, if that is not too deep.
    fn deeper(&mut self, read: impl FnOnce(&mut Self) -> Value) -> Value {
        self.depth += 1;
        if self.depth > DEEPEST * LEVELS.len() {
            return Err(format!("is nested deeper than {DEEPEST}"));
        }
        let value = read(self);
        self.depth -= 1;
        value
    }

    fn level(&mut self, level: usize) -> Value {
        self.deeper(|p| p.operators(level))
    }

    fn operators(&mut self, level: usize) -> Value {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        if level == 2 && self.take("not") {
            return Ok(self.level(level)?.map(|x| Number::Int(i64::from(!x.truth()))));
        }
        let mut left = self.level(level + 1)?;
        let (mut last, mut chained) = (left, false);
        while let Some(&op) = operators.iter().find(|op| self.take(op)) {
            let right = self.level(level + 1)?;
            let link = last.zip(right).and_then(|(a, b)| binary(op, a, b));
            left = match level {
                0 | 1 => logic(op, left, right),
                // `a < b < c` is `a < b and b < c`
                2 if chained => logic("and", left, link),
                _ => link,
            };
            (last, chained) = (if level == 2 { right } else { left }, true);
        }
        Ok(left)
    }

    fn unary(&mut self) -> Value {
        if self.take("-") {
            return Ok(self.deeper(Self::unary)?.and_then(|x| binary("-", Number::Int(0), x)));
        }
        let base = self.primary()?;
        if self.take("**") {
            return Ok(base.zip(self.deeper(Self::unary)?).and_then(|(a, b)| binary("**", a, b)));
        }
        Ok(base)
    }

    fn primary(&mut self) -> Value {
        let token = self.next()?;
        if token == "(" {
            let inner = self.level(0)?;
            self.expect(&[")"])?;
            return Ok(inner);
        }
        if token.starts_with(|c: char| c.is_ascii_digit()) {
            let plain = token.replace('_', "");
            let number = plain.parse().map(Number::Int).or_else(|_| plain.parse().map(Number::Float));
            return number.map(Some).map_err(|_| format!("`{token}` is not a number"));
        }
        if !token.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            return Err(format!("`{token}` is not expected"));
        }
        if matches!(token, "True" | "False") {
            return Ok(Some(Number::Int(i64::from(token == "True"))));
        }
        let int = |value: Option<Number>| value.and_then(|x| if let Number::Int(i) = x { Some(i) } else { None });
        if ["min", "max", "abs", "ceil_div", "next_power_of_2"].contains(&token) && self.take("(") {
            let mut args = vec![int(self.level(0)?)];
            while self.take(",") {
                args.push(int(self.level(0)?));
            }
            self.expect(&[")"])?;
            let args: Option<Vec<i64>> = args.into_iter().collect();
            return Ok(args.and_then(|args| function(token, &args)).map(Number::Int));
        }
        if self.take("[") {
            let index = int(self.level(0)?);
            self.expect(&["]", ".", "item", "(", ")"])?;
            return Ok(index.and_then(|i| self.facts.element(token, i)).map(Number::Int));
        }
        if self.take(".") {
            self.expect(&["shape", "["])?;
            let index = int(self.level(0)?);
            self.expect(&["]"])?;
            let size = index.zip(self.facts.shape(token)).and_then(|(i, shape)| {
                let i = if i < 0 { i + shape.len() as i64 } else { i };
                shape.get(usize::try_from(i).ok()?).map(|&n| n as i64)
            });
            return Ok(size.map(Number::Int));
        }
        Ok(self.facts.axis(token).map(Number::Int))
    }
}

fn function(name: &str, args: &[i64]) -> Option<i64> {
    match (name, args) {
        ("min", _) => args.iter().min().copied(),
        ("max", _) => args.iter().max().copied(),
        ("abs", [x]) => x.checked_abs(),
        ("ceil_div", [a, b]) if *b > 0 => Some(a.div_euclid(*b) + i64::from(a.rem_euclid(*b) != 0)),
        ("next_power_of_2", [x]) => i64::try_from(u64::try_from(*x).ok()?.checked_next_power_of_two()?).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Known;
    impl Facts for Known {
        fn axis(&self, name: &str) -> Option<i64> {
            match name {
                "a" => Some(7),
                "b" => Some(3),
                _ => None,
            }
        }
        fn shape(&self, tensor: &str) -> Option<Vec<usize>> {
            (tensor == "t").then(|| vec![2, 5])
        }
        fn element(&self, tensor: &str, index: i64) -> Option<i64> {
            (tensor == "p").then_some(10 + index)
        }
    }

    #[test]
    fn values_are_those_of_python() {
        for (text, want) in [
            ("a == b + 4", Some(1)),
            ("a // b * b + a % b == a", Some(1)),
            ("-a // b", Some(-3)),
            ("-a % b", Some(2)),
            ("2 ** 3 ** 2 == 512", Some(1)),
            ("-2 ** 2 == -4", Some(1)),
            ("1 < b < a <= 7", Some(1)),
            ("1 < b < a < 7", Some(0)),
            ("not a == 7", Some(0)),
            ("t.shape[-1] == 5 and t.shape[0] == 2", Some(1)),
            ("p[-1].item() == 9", Some(1)),
            ("q[-1].item() == 9", None),
            ("q[-1].item() == 9 or a == 7", Some(1)),
            ("zzz == 1 and a == 8", Some(0)),
            ("a / 0 == 1", None),
            ("a % 0", None),
            ("(a + 1) / 2 == 4", Some(1)),
            ("ceil_div(a, b) * max(1, b, 2)", Some(9)),
            ("next_power_of_2(a)", Some(8)),
        ] {
            let got = Expr::parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).eval(&Known);
            assert_eq!(got, want.map(Number::Int), "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_said() {
        for text in ["a ==", "a b", "a = b", "a.b", "(a", "a[0]", "f(x)", "\"x\"", "lambda: 1"] {
            assert!(Expr::parse(text).is_err(), "{text}");
        }
        assert!(Expr::parse(&"(".repeat(100_000)).is_err());
        assert!(Expr::parse(&"-".repeat(100_000)).is_err());
    }
}
