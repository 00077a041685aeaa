"""Names of people: one word each, none of which occurs in a question otherwise."""

NAMES = (
    *("Alice", "Bob", "Carol", "David", "Erin", "Frank", "Grace", "Henry", "Irene", "Jack"),
    *("Karen", "Leo", "Maria", "Nathan", "Olga", "Peter", "Quinn", "Rosa", "Samuel", "Tina"),
    *("Ursula", "Victor", "Wanda", "Xavier", "Yara", "Zoe", "Adam", "Bella", "Carlos", "Diana"),
    *("Edgar", "Fiona", "George", "Hannah", "Ivan", "Julia", "Kevin", "Laura", "Martin", "Nora"),
    *("Oscar", "Paula", "Ralph", "Sara", "Thomas", "Ulrich", "Vera", "Walter", "Yusuf", "Zelda"),
    *("Anton", "Bruno", "Clara", "Dora", "Emil", "Felix", "Gina", "Hugo", "Ida", "Jonas"),
    *("Kira", "Lena", "Milan", "Nina"),
)
