"""Operations whose bits do not depend on how many rows run beside a row."""
